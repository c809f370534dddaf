"""Engines with tiers below a device that holds next to nothing: the same tokens as without."""

from collections import Counter

import numpy as np
import pytest

from kernels_pallas.native import WHY_MISSING
from tests.serving.differential.judging import compare
from tests.support.engines.engines import Continuation, finish
from tests.support.engines.small_tiers import Free
from tests.support.fleets.split_pair import DRAFTERS, GREEDY, MAX_LEN, assert_as_alone, build, tokens
from tests.support.selection import slow, some_slow

# Two running sequences with their drafts, and little other space: nearly every checkpoint is evicted.
SMALL = {"max_num_seqs": 2, "num_slots": 14, "num_pages": 26, "max_num_batched_tokens": 40}
SIZE = 4_000_000 / (1 << 30)
NEEDS_NATIVE = pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")
TIERS = {
    "host": {"host_cache_gib": SIZE},
    "disk": {"disk_cache_gib": 40 * SIZE},
    "host disk": {"host_cache_gib": SIZE, "disk_cache_gib": 40 * SIZE},
    "small host": {"host_cache_gib": SIZE / 200},
    "small host, disk": {"host_cache_gib": SIZE / 200, "disk_cache_gib": SIZE},
    "disk of two members": {"disk_cache_gib": 40 * SIZE, "context_parallel_size": 2},
}


@pytest.mark.full
@pytest.mark.parametrize(("mode", "source", "tiers"), [
    ("all", "mtp", "host disk"), ("align", "mtp", "disk of two members"),
    slow("all", "none", "host"), slow("all", "none", "small host"), slow("all", "none", "small host, disk"),
    slow("align", "mtp", "disk"),
    slow("align", "none", "host disk"), slow("align", "none", "disk"),
    slow("all", "ngram", "disk"), slow("all", "ngram", "host"), slow("align", "ngram", "host disk"),
    slow("all", "mtp", "small host, disk"), slow("align", "mtp", "host"),
])  # fmt: skip
def test_the_same_tokens_with_tiers(mode, source, tiers, tmp_path):
    """Conversations in turn, two requests at a time: each prompt goes on from the one before it."""
    folder = {"disk_cache": str(tmp_path)} if "disk" in tiers else {}
    engine = build(mode, source, **(SMALL | TIERS[tiers] | folder)).engine
    engine.loop.scheduler.tiers.fetch_costs = Free()
    for prompt, output in conversations(engine).items():
        assert_as_alone(prompt, output, (mode, source, tiers))
    scheduler = engine.loop.scheduler
    scheduler.check(idle=True)
    stats = scheduler.stats()
    assert stats["states_evicted"] > 5
    if "small" not in tiers:
        assert sum(tier["arrived"] for tier in stats["tiers"].values()) > 3, stats
    assert sum(tier["lost"] for tier in stats["tiers"].values()) == 0, stats
    engine.close()


@pytest.mark.full
def test_other_numbers_of_members_find_the_same_after_a_restart(tmp_path):
    for tiers in ("disk of two members", "disk", "disk of two members"):
        engine = build("all", "none", **(SMALL | TIERS[tiers] | {"disk_cache": str(tmp_path)})).engine
        engine.loop.scheduler.tiers.fetch_costs = Free()
        known = bool(engine.loop.scheduler.stats()["tiers"]["disk"]["units"])
        for prompt, output in conversations(engine).items():
            assert_as_alone(prompt, output, tiers)
            assert not known or output.num_cached_tokens == len(prompt)
        engine.close()
        assert engine.loop.scheduler.stats()["tiers"]["disk"]["arrived"] > 3
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.full
@pytest.mark.parametrize("source", some_slow(DRAFTERS, "dflash"))
def test_a_drafter_drafts_from_what_came_back_as_from_what_was_computed(source):
    engine, cold = build("all", source, **(SMALL | TIERS["host"])).engine, build("all", source).engine
    engine.loop.scheduler.tiers.fetch_costs = Free()
    outputs = conversations(engine)
    for prompt in reversed(outputs):  # what was said long ago was evicted
        found = []
        for each in (engine, cold):
            own = each.add_request(f"{len(found)} {prompt}", {"prompt_token_ids": list(prompt)}, GREEDY)
            finish(each)
            found.append((own.outputs[0].token_ids, np.asarray(each.loop._rows.drafts).max(axis=0).tolist()))
        assert found[0][0] == found[1][0] == outputs[prompt].outputs[0].token_ids
    assert sum(tier["arrived"] for tier in engine.loop.scheduler.stats()["tiers"].values()) > 5
    engine.close()


def conversations(engine):
    """Five talkers in turn, each prompt going on from the one before it: outputs by prompt."""
    outputs = {}
    for turn in range(1, 4):
        for pair in ((0, 1), (2, 3), (4,)):
            for talker in pair:
                prompt = tuple(tokens(talker, min(19 * turn + talker, MAX_LEN - 14)))
                outputs[prompt] = engine.add_request(f"{talker} {turn}", {"prompt_token_ids": list(prompt)}, GREEDY)
            finish(engine)
    return outputs


@pytest.mark.full
@pytest.mark.parametrize(
    ("flags", "bound"),
    [
        ({}, 1e-4),
        ({"checkpoint_dtype": "int8"}, 2e-3),
        slow({"checkpoint_dtype": "bfloat16"}, 2e-3),
        slow({"checkpoint_dtype": "float16"}, 2e-3),
        pytest.param({"schedule_invariant": True, "context_parallel_size": 2}, 0, marks=NEEDS_NATIVE),
    ],
)
def test_what_comes_back_says_what_a_cold_run_says(flags, bound, monkeypatch):
    """Checkpoints in fewer bits are rounded at the same places in both; schedule-invariant members keep all bits."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)  # members divide prefill
    engine = build("all", "none", **(SMALL | TIERS["host"] | flags)).engine
    engine.loop.scheduler.tiers.fetch_costs = Free()
    got = conversations(engine)
    stats = engine.loop.scheduler.stats()["tiers"]["host"]
    assert stats["arrived"] > 3, stats
    engine.close()
    cold = conversations(build(None, "none", enable_prefix_caching=False, **flags).engine)
    for prompt, output in cold.items():
        compare(Counter(), got[prompt].outputs[0], Continuation.of(output.outputs[0]), f"{prompt}", bound, 1e-3)


def test_tiers_hold_more_of_them():
    sizes = {}
    for flags in ({}, {"checkpoint_dtype": "int8"}):
        engine = build("all", "none", **(SMALL | TIERS["host"] | flags)).engine
        sizes[bool(flags)] = engine.loop.scheduler.tiers.host.sizes.state
        engine.close()
    assert sizes[True] < 0.6 * sizes[False]  # convolution windows stay as they are
