"""What users see of drafts: a crowd whose members preempt each other, and second turns, say what they say without."""

import dataclasses
import random
from functools import partial

import pytest

from mamba_jax.programs import StepPrograms
from serving import LLM, ConfigError, SamplingParams
from serving.engine.assembly import build
from tests.support.engines import QUICK_COMPILE

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SIZES = {"max_num_seqs": 4, "num_slots": 36, "num_pages": 24}


@pytest.fixture(scope="module")
def llm(harness):
    """By the defaults, adaptive drafts among them; all steps of a kind have one shape, to compile less."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "StepPrograms", partial(StepPrograms, compiler_options=QUICK_COMPILE))
        flags = harness.flags | SIZES
        llm = LLM(harness.golden, num_speculative_tokens=3, speculative_method="ngram", mamba_cache_mode="all", **flags)
    batches = llm.engine.loop.batches
    batches.decode_shapes, batches.prefill_shapes = [4], batches.prefill_shapes[-1:]
    return llm


def ask(llm, prompts, params):
    return llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)


@pytest.mark.full
def test_64_requests_at_once_say_what_they_say_without_drafts(harness, llm):
    rng = random.Random(3)
    few = dict.fromkeys((5, 6, 9), 100.0)
    prompts, params = [], []
    for i in range(64):
        phrase = harness.prompt(rng, rng.randrange(2, 9))
        prompts.append((phrase * 30)[: rng.choice([1, 5, 16, 31, 33, 48, 64])])
        length = rng.randrange(1, 30) if i % 8 else 70  # the long ones outgrow the pages
        params.append(dataclasses.replace(GREEDY, max_tokens=length, logit_bias=few if i % 2 else None))
    plain = harness.run(harness.engine("none"), prompts, params)
    outputs = ask(llm, prompts, params)
    for prompt, each, theirs, ours in zip(prompts, params, plain, outputs, strict=True):
        assert len(ours.outputs[0].token_ids) == each.max_tokens
        among = tuple(each.logit_bias) if each.logit_bias else None
        harness.assert_greedy(prompt, theirs.outputs[0].token_ids, ours.outputs[0].token_ids, among)
    stats = llm.engine.stats()
    assert stats["preemptions"] > 0
    drafts = llm.engine.loop.stats.drafts
    assert stats["drafted_tokens"] == drafts.drafted > drafts.accepted > 50
    assert stats["drafts"]["wasted"] == drafts.drafted - drafts.accepted
    assert drafts.accepted_at == sorted(drafts.accepted_at, reverse=True)
    assert drafts.mean_acceptance_length > 1
    assert max(output.metrics.drafts.mean_acceptance_length for output in outputs) > 2
    llm.engine.loop.scheduler.check(idle=True)


@pytest.mark.full
def test_the_second_turn_finds_what_was_decoded_and_says_what_a_cold_run_says(harness, llm):
    rng = random.Random(4)
    prompt = harness.prompt(rng, 12)
    params = dataclasses.replace(GREEDY, max_tokens=80, logit_bias=dict.fromkeys((5, 6, 9), 100.0))
    (first,) = ask(llm, [prompt], params)
    assert first.metrics.drafts.accepted > 0
    turn = [*prompt, *first.outputs[0].token_ids, *harness.prompt(rng, 9)]
    after = dataclasses.replace(GREEDY, max_tokens=24)
    (second,) = ask(llm, [turn], after)
    # Whole blocks of 32 that no prompt has ever ended in: only decoding can have finished them.
    assert second.num_cached_tokens == 64
    (cold,) = harness.run(harness.engine("none"), [turn], after)
    harness.assert_greedy(turn, cold.outputs[0].token_ids, second.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"speculative_method": "mtp"}, "has no multi-token-prediction layer; try 'ngram'"),
        (
            {"num_speculative_tokens": 3, "num_slots": 3, "replay_interval": 1},
            "num_slots=3 cannot hold one sequence: at least 8 are needed",
        ),
        ({"num_speculative_tokens": 32}, "num_speculative_tokens: must be less than or equal to 16, got 32"),
    ],
)
def test_drafts_that_cannot_be_are_one_clear_line(harness, flags, said):
    with pytest.raises(ConfigError) as error:
        LLM(harness.golden, **flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
