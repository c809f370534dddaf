"""`replay_interval`: allowed and chosen values, and memory."""

import dataclasses
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_config
from kernels_pallas import native
from kernels_pallas.recurrence.api import REPLAY
from mamba_jax.store import Replay, StoreShape, init_store, store_bytes
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.replay import resolve_replay, spares, state_traffic
from serving.engine.assembly.sizing import size_store
from tests.support.models.tiny_configs import FOR_ENGINES

SHAPE = StoreShape.of(FOR_ENGINES["nemotronh"])


def resolved(shape, platform="cpu", weight_bytes=0, **flags):
    return resolve_replay(EngineConfig.create(**flags), shape, platform=platform, weight_bytes=weight_bytes)


def test_a_state_that_cannot_be_replayed_refuses_and_is_not_chosen():
    # As of a mixer that declares no tail of what accumulates.
    shape = dataclasses.replace(SHAPE, tails=tuple(tuple(t for t in tails if t.of != "ssm") for tails in SHAPE.tails))
    with pytest.raises(ConfigError, match="this model's state 'ssm' cannot be replayed; allowed is 1"):
        resolved(shape, replay_interval=16)
    found = resolved(shape, "tpu")
    assert found.replay is None
    assert "chosen: the state 'ssm' cannot be replayed" in found.notice


@pytest.mark.parametrize("model", ["nemotronh", "joined", "kimi", "lightning", "selective"])
def test_what_is_asked_for(model):
    shape = StoreShape.of(FOR_ENGINES[model])
    assert resolved(shape, replay_interval=16, num_speculative_tokens=3).replay == Replay(16, 3)
    assert resolved(shape, "tpu", replay_interval=1).replay is None


NEMOTRON = StoreShape.of(load_config("nemotron-h-8b"))
OF_8B = {"shape": NEMOTRON, "weight_bytes": 16_200_000_000}


@pytest.mark.parametrize(
    ("platforms", "flags", "interval", "why"),
    [
        ("tpu gpu", {"max_num_seqs": 128, "num_speculative_tokens": 3}, 16, "it saves 54% of a step's bytes (max_num_"),
        ("tpu gpu", {"max_num_seqs": 64}, 16, "it saves 17% of a step's bytes (max_num_seqs 64, drafts 0)"),
        ("tpu gpu", {"max_num_seqs": 2}, 1, "replay would save 0.9% of a step's bytes (max_num_seqs 2, drafts 0)"),
        ("tpu gpu", {"max_num_seqs": 8, "num_speculative_tokens": 16}, 64, "it saves"),
        ("tpu gpu", {"max_num_seqs": 64, "tile_size": 8}, 8, "it saves"),
        ("tpu gpu", {"tile_size": 4, "page_size": 4, "num_speculative_tokens": 3}, 1, "no other divides tile_size 4 w"),
        ("cpu", {"num_speculative_tokens": 3}, 16, "it saves"),
        ("cpu", {"num_speculative_tokens": 1, "max_num_seqs": 8}, 16, "it saves"),
        ("cpu", {"num_speculative_tokens": 3, "max_num_seqs": 1}, 16, "it saves"),
        ("cpu", {"num_speculative_tokens": 1, "max_num_seqs": 2}, 1, "on CPU replay is faster from 3 drafts a step on"),
        ("cpu", {}, 1, "on CPU replay is faster from 3 drafts a step on (max_num_seqs 64, drafts 0)"),
        ("cpu", {"num_speculative_tokens": 3, "ssm_dtype": "float16"}, 1, "on CPU the replay of float16 is slow"),
    ],
)
def test_the_interval_is_chosen_by_what_a_step_moves(platforms, flags, interval, why, monkeypatch):
    monkeypatch.setattr(native, "WHY_MISSING", None)
    for platform in platforms.split():
        found = resolved(**OF_8B, platform=platform, **flags)
        assert found.interval == interval
        assert f"(replay_interval {interval}, chosen: {why}" in found.notice


def test_replay_is_not_chosen_where_nothing_speeds_it_up(monkeypatch):
    monkeypatch.setattr(native, "WHY_MISSING", "not built")
    for model in (OF_8B, {"shape": StoreShape.of(load_config("qwen3.5-27b"))}):
        found = resolved(**model, platform="cpu", max_num_seqs=128, num_speculative_tokens=3)
        assert found.replay is None
        assert "CPU has no kernel for the replay of this model's states" in found.notice


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("model", ["qwen3.5-27b", "kimi-linear-48b-a3b"])
def test_gated_delta_nets_are_replayed_with_drafts(model, platform):
    shape = StoreShape.of(load_config(model))
    assert resolved(shape, platform, num_speculative_tokens=3).interval == 16


@pytest.mark.parametrize(("state", "lacks"), [("ssm", set()), ("delta", {"cpu"})])
def test_kernels_are_declared_as_they_are(state, lacks):
    shapes = (StoreShape.of(FOR_ENGINES["joined"]), SHAPE)
    (declared,) = {shape.arrays[state].replay_kernels for shape in shapes if state in shape.arrays}
    assert set(declared) == {each.platform for each in REPLAY} - lacks - {None}


def test_a_state_moved_per_row_is_at_most_what_was_planned_for():
    """In states: 2 and 5 by snapshots; here with what a tail takes, which is read and written back whole."""

    def states(interval, drafts):
        moved = state_traffic(NEMOTRON, interval, drafts, dtype="bfloat16", ssm_dtype="float32")
        return moved / NEMOTRON.bytes_per_slot("bfloat16")

    assert states(1, 0) == 2
    assert states(1, 3) == 5
    assert 1.06 < states(16, 0) < 1.25
    assert 1.25 < states(16, 3) < 1.65


@pytest.mark.parametrize(("drafts", "interval"), [(0, 16), (3, 8), (3, 16), (3, 64), (7, 16)])
def test_spares_suffice_for_rows_at_random_places(drafts, interval):
    """Each row holds one while its settled length is within two steps of a multiple."""
    rows, random = 96, np.random.default_rng(interval)
    most = spares(rows, Replay(interval, drafts))
    left = random.integers(0, interval, (20_000, rows))
    wanted = (left >= interval - 2 * (1 + drafts)).sum(axis=1)
    assert (wanted > most).mean() < 0.003
    assert most <= rows
    assert spares(1, Replay(interval, drafts)) == 1


@pytest.mark.parametrize("mode", ["none", "all"])
@pytest.mark.parametrize("memory", [1 << 20, 64 << 20])
def test_an_anchor_a_tail_and_now_and_then_a_spare_for_each_sequence(mode, memory):
    def size(**flags):
        config = EngineConfig.create(num_speculative_tokens=3, debug_state=True, tile_size=16, **flags)
        replay = resolve_replay(config, SHAPE, platform="cpu", weight_bytes=0).replay
        return size_store(
            config, SHAPE, mode=mode, dtype=jnp.float32, model_max_len=512, memory=memory, most_tokens=sys.maxsize,
            replay=replay,
        )  # fmt: skip

    found, snapshots = size(replay_interval=16), size(replay_interval=1)
    rows = found.max_num_seqs
    assert found.total_bytes <= memory
    assert found.running_slots == rows + spares(rows, Replay(16, 3)) <= found.num_slots - 1
    assert snapshots.running_slots == snapshots.max_num_seqs * (4 if mode == "none" else 8)
    assert f"({rows} anchors and {found.running_slots - rows} spares for running sequences" in found.report()
    assert "near the end of each interval of 16 tokens" in found.report()
    store = init_store(
        SHAPE, num_slots=found.num_slots, num_pages=found.num_pages, page_size=32, dtype=jnp.float32, debug_state=True,
        replay=Replay(16, 3), num_tails=1 + found.max_num_seqs,
    )  # fmt: skip
    assert store_bytes(store) == found.total_bytes
