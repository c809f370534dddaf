"""Which form running rows have: a state after every token of a step (snapshots), or an anchor and replayed inputs."""

from __future__ import annotations

from typing import NamedTuple

from mamba_jax.store import StoreShape
from mamba_jax.tails import Replay
from serving.config import ConfigError, EngineConfig


class ResolvedReplay(NamedTuple):
    """What `replay_interval` amounts to."""

    interval: int
    """1 = snapshots."""
    notice: str
    """Why, for the report at start."""
    num_drafts: int

    @property
    def replay(self) -> Replay | None:
        """What the store is made for; None = snapshots."""
        return Replay(self.interval, self.num_drafts) if self.interval > 1 else None


def resolve_replay(config: EngineConfig, shape: StoreShape) -> ResolvedReplay:
    """The interval asked for, or snapshots.

    Raises:
        ConfigError: the model has a state that cannot be replayed.
    """
    drafts, asked = config.num_speculative_tokens, config.replay_interval
    if asked is not None and asked > 1 and shape.slots and shape.without_replay:
        raise ConfigError(
            f"replay_interval is {asked}: this model's state {shape.without_replay!r} cannot be replayed; allowed is 1"
        )
    if asked is None:
        return ResolvedReplay(1, "a state for each token (replay_interval 1, the default)", drafts)
    if asked == 1 or not shape.slots:
        return ResolvedReplay(1, "a state for each token (replay_interval 1)", drafts)
    return ResolvedReplay(asked, f"a state every {asked} tokens, replayed in between (replay_interval {asked})", drafts)
