"""Where drafts come from, and what is counted of them."""

import dataclasses
from dataclasses import asdict

import numpy as np
import pytest

from mamba_jax.drafts import MTPDrafts, NGramDrafts
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.drafting import draft_source
from serving.engine.stats import DraftStats, merged_stats


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
        "steps": 3, "drafted": 6, "accepted": 3, "wasted": 3, "acceptance_at": [2 / 3, 1 / 2, 0],
        "mean_acceptance_length": 2,
    }  # fmt: skip


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
