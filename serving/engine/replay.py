"""Which form running rows have: a state after every token of a step (snapshots), or an anchor and replayed inputs.

Unless `replay_interval` says so, it is chosen by what a full decode step moves: on platforms that have kernels for the
replay of all of a model's states, that with the fewest bytes; elsewhere, and where it saves next to nothing, snapshots.
On CPU computing counts as well, and replay is chosen only with as many drafts as it was measured to be faster with.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from mamba_jax.store import StoreShape
from mamba_jax.tails import Replay
from serving.config import ConfigError, EngineConfig
from serving.core import replay_intervals

WORTH = 0.02
"""The least share of a step's bytes that replay has to save before it is chosen unasked."""
_USUAL = 16
"""The smallest interval that is chosen unasked, where it is allowed: below it more rows need a spare, for few bytes."""

_DRAFTS_ON_CPU = 3
"""The least drafts of a full step, all rows together, with which replay is chosen on CPU."""


class ResolvedReplay(NamedTuple):
    """What `replay_interval` amounts to."""

    interval: int
    """1 = snapshots."""
    notice: str
    """What decoding keeps, and why, for the report at start."""
    num_drafts: int

    @property
    def replay(self) -> Replay | None:
        """What the store is made for; None = snapshots."""
        return Replay(self.interval, self.num_drafts) if self.interval > 1 else None


def resolve_replay(config: EngineConfig, shape: StoreShape, *, platform: str, weight_bytes: int) -> ResolvedReplay:
    """The interval asked for, or the one that suits the platform, the model and as many rows as may run at once.

    Args:
        config: every flag.
        shape: of the whole model's state.
        platform: "cpu", "gpu" or "tpu".
        weight_bytes: of the whole model: what a step moves beside states.

    Raises:
        ConfigError: one is asked for, and the model has a state that cannot be replayed.
    """
    drafts, asked = config.num_speculative_tokens, config.replay_interval
    if asked is not None and asked > 1 and shape.slots and shape.without_replay:
        raise ConfigError(
            f"replay_interval is {asked}: this model's state {shape.without_replay!r} cannot be replayed; allowed is 1"
        )
    if not shape.slots:
        return ResolvedReplay(1, "no states: the model has none", drafts)
    if asked is not None:
        return ResolvedReplay(asked, f"{_form(asked)} (replay_interval {asked})", drafts)
    interval, why = _choice(config, shape, platform, weight_bytes)
    return ResolvedReplay(interval, f"{_form(interval)} (replay_interval {interval}, chosen: {why})", drafts)


def spares(rows: int, replay: Replay) -> int:
    """Slots for spares that suffice nearly always where `rows` decode side by side.

    A row has a spare while its settled length is within two steps of a multiple of R: the one that has not settled, and
    the one that is planned. Rows are at any place between multiples: so many at once, and three standard deviations.
    More may still want one, for example where equal prompts came together; a row that gets none does without drafts.
    """
    chance = min(1.0, 2 * (1 + replay.num_drafts) / replay.interval)
    return min(rows, math.ceil(rows * chance + 3 * math.sqrt(rows * chance * (1 - chance))))


def state_traffic(shape: StoreShape, interval: int, drafts: int, *, dtype: str, ssm_dtype: str) -> float:
    """Bytes of states that a decode step moves for each row, in the long run.

    Snapshots: one state read, and one written after each token. Replay: one read, one written wherever a multiple of R
    is reached, and a tail read and written back whole, more than the kernel for TPU does.
    """
    slot, width = shape.bytes_per_slot(dtype, ssm_dtype), 1 + drafts
    if interval == 1:
        return slot * (1 + width)
    return slot * (1 + width / interval) + 2 * shape.bytes_per_tail(dtype, ssm_dtype, Replay(interval, drafts))


def _choice(config: EngineConfig, shape: StoreShape, platform: str, weight_bytes: int) -> tuple[int, str]:
    """The interval, and the reason for it."""
    drafts, rows = config.num_speculative_tokens, config.max_num_seqs
    full = f"(max_num_seqs {rows}, drafts {drafts})"
    if platform == "cpu" and rows * drafts < _DRAFTS_ON_CPU:
        return 1, f"on CPU replay is faster from {_DRAFTS_ON_CPU} drafts a step on {full}"
    if platform == "cpu" and "float16" in (config.dtype, config.ssm_dtype):
        return 1, "on CPU the replay of float16 is slow"
    if shape.without_replay:
        return 1, f"the state {shape.without_replay!r} cannot be replayed"
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
