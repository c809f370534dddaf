"""Chooses the form of running rows: a state after every token of a step (snapshots), or an anchor and replayed inputs.

Without `replay_interval`, replay is chosen if the platform has replay kernels for all of the model's states, and if
replay moves enough fewer bytes in a full decode step. Otherwise snapshots are chosen. On CPU, computation matters as
well: replay is chosen only for numbers of drafts with which measurements showed it to be faster.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mamba_jax.store import Replay, StoreShape
from serving.config import ConfigError, EngineConfig
from serving.core.config import replay_intervals

WORTH = 0.02
"""The fraction of a step's bytes that replay must save to be chosen."""
_USUAL = 16
"""The smallest interval to choose, if allowed: with smaller ones, more rows need a spare slot for few bytes."""

_DRAFTS_ON_CPU = 3
"""Minimum number of drafts of all rows in a full step with which replay is chosen on CPU."""


class ResolvedReplay(NamedTuple):
    """The resolved `replay_interval`."""

    interval: int
    """1 = snapshots."""
    notice: str
    """The form and the reason for it, for the report at start."""
    num_drafts: int

    @property
    def replay(self) -> Replay | None:
        """The replay settings of the store; None = snapshots."""
        return Replay(self.interval, self.num_drafts) if self.interval > 1 else None


def resolve_replay(config: EngineConfig, shape: StoreShape, *, platform: str, weight_bytes: int) -> ResolvedReplay:
    """Returns the requested interval, or the best one for the platform, the model and the maximum number of rows.

    Args:
        config: every flag.
        shape: the shape of the whole model's state.
        platform: "cpu", "gpu" or "tpu".
        weight_bytes: bytes of the whole model's weights, which a step reads in addition to states.

    Raises:
        ConfigError: an interval is requested, and the model has a state that cannot be replayed.
    """
    drafts, asked = config.num_speculative_tokens, config.replay_interval
    if config.schedule_invariant:
        asked = 1  # the state after each token is computed from the one before
    if asked is not None and asked > 1 and shape.slots and shape.unreplayable_state:
        raise ConfigError(
            f"replay_interval is {asked}: this model's state {shape.unreplayable_state!r} cannot be replayed; "
            "allowed is 1"
        )
    if not shape.slots:
        return ResolvedReplay(1, "no states: the model has none", drafts)
    if asked is not None:
        return ResolvedReplay(asked, f"{_form(asked)} (replay_interval {asked})", drafts)
    interval, why = _choice(config, shape, platform, weight_bytes)
    return ResolvedReplay(interval, f"{_form(interval)} (replay_interval {interval}, chosen: {why})", drafts)


def spares(rows: int, replay: Replay) -> int:
    """Returns the number of spare slots that suffices in nearly all cases if `rows` rows decode.

    A row needs a spare while its settled length is within two steps (the step in flight and the planned one) of a
    multiple of R. The result assumes random positions of rows between multiples: it is the mean plus three standard
    deviations. More rows may need a spare, for example if equal prompts arrive together. A row without a spare decodes
    without drafts.
    """
    chance = min(1.0, 2 * (1 + replay.num_drafts) / replay.interval)
    return min(rows, math.ceil(rows * chance + 3 * math.sqrt(rows * chance * (1 - chance))))


def state_traffic(shape: StoreShape, interval: int, drafts: int, *, dtype: str, ssm_dtype: str) -> float:
    """Returns the mean bytes of states that a decode step moves per row.

    Snapshots: a step reads one state and writes one after each token. Replay: a step reads one state, writes one at
    each multiple of R, and reads and writes the whole tail (the TPU kernel moves less).
    """
    slot, width = shape.bytes_per_slot(dtype, ssm_dtype), 1 + drafts
    if interval == 1:
        return slot * (1 + width)
    return slot * (1 + width / interval) + 2 * shape.bytes_per_tail(dtype, ssm_dtype, Replay(interval, drafts))


def _choice(config: EngineConfig, shape: StoreShape, platform: str, weight_bytes: int) -> tuple[int, str]:
    drafts, rows = config.num_speculative_tokens, config.max_num_seqs
    full = f"(max_num_seqs {rows}, drafts {drafts})"
    if platform == "cpu" and rows * drafts < _DRAFTS_ON_CPU:
        return 1, f"on CPU replay is faster from {_DRAFTS_ON_CPU} drafts a step on {full}"
    if platform == "cpu" and "float16" in (config.dtype, config.ssm_dtype):
        return 1, "on CPU the replay of float16 is slow"
    if shape.unreplayable_state:
        return 1, f"the state {shape.unreplayable_state!r} cannot be replayed"
    if not shape.has_replay_kernels(platform):
        return 1, f"{platform.upper()} has no kernel for the replay of this model's states"
    allowed = replay_intervals(drafts, tile_size=config.tile_size)
    if not allowed:
        return 1, f"no other divides tile_size {config.tile_size} with {drafts} drafts"
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype

    def moved(interval: int) -> float:
        return state_traffic(shape, interval, drafts, dtype=dtype, ssm_dtype=config.ssm_dtype)

    best = min([each for each in allowed if each >= _USUAL] or allowed[-1:], key=moved)
    snapshots = weight_bytes + rows * moved(1)
    saved = 1 - (weight_bytes + rows * moved(best)) / snapshots
    step = f"of a step's bytes {full}"
    if saved < WORTH:
        return 1, f"replay would save {max(saved, 0):.1%} {step}"
    return best, f"it saves {saved:.0%} {step}"


def _form(interval: int) -> str:
    return "a state for each token" if interval == 1 else f"a state every {interval} tokens, replayed in between"
