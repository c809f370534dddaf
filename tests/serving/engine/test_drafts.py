"""Drafts change how fast tokens come, and nothing else."""

import dataclasses
import random
from dataclasses import asdict

import numpy as np
import pytest

from mamba_jax.drafts import MTPDrafts, NGramDrafts
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.drafting import draft_source
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.stats import DraftStats, merged_stats

# With K = 3 a row may need 8 slots where states are kept; pages for less than half of what four rows can become.
SIZES = {"max_num_seqs": 4, "num_slots": 34, "num_pages": 22}
DRAFTS = {"speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "adaptive_drafts": False}


@pytest.fixture(scope="module")
def drafting(harness):
    """Makes engines with n-gram drafts."""
    made = type(harness)(source=NGramDrafts(1, 4))

    def engine(mode):
        return made.engine(mode, **SIZES, **DRAFTS)

    return engine


def alone(harness, prompts, params):
    engine = harness.engine("none")
    return [
        harness.run(engine, [prompt], each)[0].outputs[0].token_ids
        for prompt, each in zip(prompts, params, strict=True)
    ]


FEW = (5, 6, 9)


def among_few(params):
    """Of three tokens only: they repeat, so that n-grams are often right."""
    return dataclasses.replace(params, logit_bias=dict.fromkeys(FEW, 100.0))


def repetitive(harness, rng, length):
    """Prompts in which n-grams occur again, so that some drafts are right and most are not."""
    phrase = harness.prompt(rng, rng.randrange(1, 9))
    words = []
    while len(words) < length:
        words += phrase if rng.random() < 0.8 else harness.prompt(rng, 3)
    return words[:length]


@pytest.fixture(scope="module")
def traffic(harness):
    rng = random.Random(5)
    prompts = [repetitive(harness, rng, rng.choice([1, 2, 3, 16, 17, 31, 32, 33, 64, 80, 97])) for _ in range(12)]
    shared = repetitive(harness, rng, 66)
    prompts += [shared + repetitive(harness, rng, rng.randrange(1, 12)) for _ in range(3)] + [list(prompts[-1])]
    params = [SamplingParams(temperature=0.0, max_tokens=rng.randrange(1, 40), ignore_eos=True) for _ in prompts]
    # The first ones grow until the pages do not hold them all.
    for i, length in enumerate((30, 20, 35, 26)):
        prompts[i], params[i] = repetitive(harness, rng, length), dataclasses.replace(params[i], max_tokens=60)
    params[::2] = [among_few(each) for each in params[::2]]
    return prompts, params, alone(harness, prompts, params)


@pytest.mark.parametrize("mode", ["none", "align", "all"])
def test_tokens_are_those_without_drafts(harness, drafting, traffic, mode):
    prompts, params, expected = traffic
    engine = drafting(mode)
    for _ in range(2):
        outputs = harness.run(engine, prompts, params)
        for prompt, tokens, output, each in zip(prompts, expected, outputs, params, strict=True):
            assert len(tokens) == len(output.outputs[0].token_ids)
            harness.assert_greedy(prompt, tokens, output.outputs[0].token_ids, FEW if each.logit_bias else None)
    stats, drafts = engine.loop.scheduler.stats(), engine.loop.stats.drafts
    assert stats["preemptions"] > 0
    assert (sum(output.num_cached_tokens for output in outputs) > 0) == (mode != "none")
    assert stats["drafted_tokens"] == drafts.drafted > drafts.accepted > 0
    assert drafts.accepted_at == sorted(drafts.accepted_at, reverse=True)
    assert 1 <= drafts.mean_acceptance_length <= 4
    assert sum(output.metrics.drafts.accepted for output in outputs) <= drafts.accepted


def test_outputs_end_where_they_end_without_drafts(harness, drafting):
    """A stop token, a stop text and max_tokens, wherever in a run of drafts they come."""
    rng = random.Random(17)
    prompts = [repetitive(harness, rng, 40) for _ in range(6)]
    free = among_few(SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1))
    tokens = alone(harness, prompts, [free] * 6)
    params = [dataclasses.replace(free, max_tokens=n) for n in (1, 2, 3)]
    params += [dataclasses.replace(free, stop_token_ids=[tokens[3][7]])]
    params += [dataclasses.replace(free, stop=[f"w{tokens[i][9]}"]) for i in (4, 5)]
    outputs = harness.run(drafting("all"), prompts, params)
    plain = harness.run(harness.engine("all"), prompts, params)
    for ours, theirs in zip(outputs, plain, strict=True):
        ours, theirs = ours.outputs[0], theirs.outputs[0]
        for part in ("token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(ours, part) == getattr(theirs, part)
        assert len(ours.logprobs) == len(ours.token_ids)
        assert ours.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)


def test_where_drafts_come_from(harness):
    config = harness.model.config
    with_layer = dataclasses.replace(config, mtp_pattern="*-")
    make = EngineConfig.create
    assert draft_source(make(), with_layer) is None
    assert draft_source(make(num_speculative_tokens=2), config) == NGramDrafts(2, 4)
    assert draft_source(make(num_speculative_tokens=2), with_layer) == MTPDrafts()
    assert draft_source(make(speculative_method="ngram", prompt_lookup_max=3), with_layer) == NGramDrafts(2, 3)
    with pytest.raises(ConfigError, match="has no multi-token-prediction layer; try 'ngram'"):
        draft_source(make(speculative_method="mtp"), config)
    several = dataclasses.replace(config, unused_mtp_layers=2)
    assert draft_source(make(), several) is None
    with pytest.raises(ConfigError, match="has 2 multi-token-prediction layers, of which only a single"):
        draft_source(make(speculative_method="mtp"), several)


def test_counters_of_drafts():
    stats = DraftStats()
    assert stats.mean_acceptance_length == 1
    stats.add([3, 0, 2, 1], np.array([[5, 6, -1, -1], [5, -1, -1, -1], [5, 6, 7, -1], [4, -1, -1, -1]]))
    assert (stats.drafted_at, stats.accepted_at) == ([3, 2, 1], [2, 1, 0])
    assert (stats.drafted, stats.accepted, stats.wasted, stats.steps) == (6, 3, 3, 3)
    assert stats.mean_acceptance_length == 2
    assert stats.acceptance_at == [2 / 3, 1 / 2, 0]
    assert stats.summary() == {
        "steps": 3,
        "drafted": 6,
        "accepted": 3,
        "wasted": 3,
        "acceptance_at": [2 / 3, 1 / 2, 0],
        "mean_acceptance_length": 2,
    }


def test_statistics_of_replicas_are_added():
    def stats(drafts, version):
        loop = {"steps": 5, "drafts": asdict(drafts)}
        weights = {"version": version, "updates": int(version)}
        return {"requests": 3, "loop": loop, "weights": weights, "slots": {"total": 9}, "held": None}

    found = merged_stats([stats(DraftStats(2, [2, 1], [1, 0]), "0"), stats(DraftStats(2, [2], [2]), "1")])
    assert (found["requests"], found["loop"]["steps"], found["slots"]) == (6, 10, {"total": 18})
    assert found["weights"] == {"version": "0, 1", "updates": 1}
    assert found["drafts"] == DraftStats(4, [4, 1], [3, 0]).summary()
    assert len(found["engines"]) == 2
