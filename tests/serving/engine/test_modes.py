"""The same tokens in every cache mode, whatever else runs and however often a request is preempted."""

import random

import pytest

from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.steps.loop import WarmUpStopped
from tests.support.engines.engines import finish

LENGTHS = [1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 96, 97, 100]


@pytest.fixture(scope="module")
def traffic(harness):
    """64 requests of mixed lengths, some of which share beginnings, and each one's tokens when it runs alone."""
    rng = random.Random(5)
    prompts = [harness.prompt(rng, rng.choice(LENGTHS)) for _ in range(40)]
    shared = [harness.prompt(rng, length) for length in (33, 64, 80)]
    prompts += [rng.choice(shared) + harness.prompt(rng, rng.randrange(1, 30)) for _ in range(20)]
    prompts += [list(prompts[-1]) for _ in range(4)]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 28), ignore_eos=True) for _ in prompts]
    engine = harness.engine("none")
    alone = []
    for prompt, each in zip(prompts, params, strict=True):
        (output,) = harness.run(engine, [prompt], each)
        alone.append(output.outputs[0].token_ids)
    return prompts, params, alone


def test_alone_is_what_the_model_says(harness, traffic):
    prompts, _, alone = traffic
    for prompt, tokens in list(zip(prompts, alone, strict=True))[::9]:
        logits = harness.logits([*prompt, *tokens])
        for at, token in enumerate(tokens, start=len(prompt) - 1):
            assert logits[at].max() - logits[at, token] < 1e-4


def test_a_warm_up_can_be_left(harness):
    loop = harness.engine("all").loop
    loop.leaving.set()
    compiled = loop.programs.compilations
    with pytest.raises(WarmUpStopped):
        loop.warm_up(loop.batches.warm_up_batches(harness.vocab_size))
    assert loop.programs.compilations <= compiled + 4


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_concurrent_requests_equal_requests_alone(harness, traffic, mode):
    prompts, params, alone = traffic
    engine = harness.engine(mode)
    for second in (False, True):
        outputs = harness.run(engine, prompts, params)
        for prompt, tokens, output in zip(prompts, alone, outputs, strict=True):
            assert len(tokens) == len(output.outputs[0].token_ids)
            harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids)
            assert output.outputs[0].finish_reason == "length"
            assert output.num_cached_tokens <= len(prompt)
            assert (output.num_cached_tokens > 0) == (output.miss_reason is None)
        if second:
            assert (sum(output.num_cached_tokens for output in outputs) > 0) == (mode != "none")
    stats = engine.loop.scheduler.stats()
    assert stats["preemptions"] > 0
    assert mode == "none" or stats["states_evicted"] > 0


@pytest.mark.parametrize("mode", ["align", "all"])
def test_a_repeated_prompt_computes_nothing(harness, mode):
    engine = harness.engine(mode)
    rng = random.Random(1)
    prompt = harness.prompt(rng, 70)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    (cold,) = harness.run(engine, [prompt], params)
    fed = engine.loop.stats.prefill_tokens
    (warm,) = harness.run(engine, [prompt], params)
    assert engine.loop.stats.prefill_tokens == fed
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, 70)
    assert cold.miss_reason is not None
    assert warm.miss_reason is None
    assert warm.outputs[0].token_ids == cold.outputs[0].token_ids
    (longer,) = harness.run(engine, [[*prompt, *cold.outputs[0].token_ids, 5]], params)
    assert longer.num_cached_tokens >= 70


def test_nothing_compiles_after_the_warm_up(harness):
    engine = harness.engine("all")
    engine.loop.warm_up(engine.loop.batches.warm_up_batches(harness.vocab_size))
    compiled = engine.loop.programs.compilations
    rng = random.Random(3)
    prompts = [harness.prompt(rng, rng.choice(LENGTHS)) for _ in range(500)]
    params = [
        SamplingParams(
            temperature=rng.choice([0.0, 1.0]),
            max_tokens=rng.randrange(1, 6),
            logprobs=rng.choice([None, 2]),
            prompt_logprobs=rng.choice([None, None, 1]),
            presence_penalty=rng.choice([0.0, 0.5]),
        )
        for _ in prompts
    ]
    harness.run(engine, prompts, params)
    assert engine.loop.programs.compilations == compiled


def test_a_step_that_fails_loses_nothing_but_time(harness, traffic):
    prompts, params, alone = (part[:16] for part in traffic)
    engine = harness.engine("all")
    failing = iter([3, 9, 20])
    at = next(failing)

    def fault(plan):
        nonlocal at
        if engine.loop.stats.steps >= at:
            at = next(failing, 10**9)
            raise RuntimeError("device lost")

    engine.loop.fault = fault
    outputs = harness.run(engine, prompts, params)
    assert engine.loop.stats.failures == 3
    assert engine.loop.scheduler.stats()["resets"] == 3
    for prompt, tokens, output in zip(prompts, alone, outputs, strict=True):
        harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids)


def test_a_fault_that_stays_is_reported_and_later_requests_run(harness):
    engine = harness.engine("all")

    def fault(plan):
        raise RuntimeError("device lost")

    engine.loop.fault = fault
    engine.add_request("a", {"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=2))
    with pytest.raises(RuntimeError, match="device lost"):
        finish(engine)
    engine.abort_all()
    engine.loop.fault = None
    (output,) = harness.run(engine, [[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 2


def test_an_interrupt_between_dispatch_and_result_leaves_a_working_engine(harness, traffic):
    prompts, params, alone = (part[:4] for part in traffic)
    engine = harness.engine("all")

    def interrupt(plan):
        if engine.loop.stats.steps == 3:
            engine.loop.fault = None
            raise KeyboardInterrupt

    engine.loop.fault = interrupt
    with pytest.raises(KeyboardInterrupt):
        harness.run(engine, prompts, params)
    engine.abort_all()
    engine.loop.scheduler.check(idle=True)
    for prompt, tokens, output in zip(prompts, alone, harness.run(engine, prompts, params), strict=True):
        harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids)
