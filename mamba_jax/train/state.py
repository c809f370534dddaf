"""What a run carries from step to step, and how it is kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int

from mamba_jax.config import ModelConfigError

KEPT_CHECKPOINTS = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that decides how a run goes on, beside its settings and its data."""

    step: Int[Array, ""]
    """Steps done."""
    values: dict[str, Array]
    """The weights that are trained, float32, by dotted path."""
    optimizer: Any


class Checkpoints:
    """A run's states on disk, the latest few; a state that was not written completely does not count.

    Args:
        directory: made if need be.
    """

    def __init__(self, directory: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, create=True)
        self._manager = ocp.CheckpointManager(directory.expanduser().resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """Steps done in the newest state."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Write a state; returns when it is on disk."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state), force=True)
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState:
        """The newest state, placed as `like` is.

        Raises:
            ModelConfigError: it is of another model or optimiser.
        """
        targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            return self._manager.restore(self.latest, args=ocp.args.StandardRestore(targets))
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelConfigError(f"the run on disk does not fit this configuration ({reason})") from error

    def close(self) -> None:
        """Let go of the directory."""
        self._manager.close()
