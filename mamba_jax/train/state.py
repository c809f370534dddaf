"""The state of a training run, and its checkpoints on disk."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int

from mamba_jax.config import ModelConfigError

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
KEPT_CHECKPOINTS = 2


def has_steps(directory: Path) -> bool:
    """Returns whether a run's folder has a state after some steps."""
    return any(path.name.isdigit() for path in (directory / CHECKPOINTS).glob("*"))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run, except for its settings and data."""

    step: Int[Array, ""]
    """Steps done."""
    values: dict[str, Array]
    """The trained weights in float32, by dotted path."""
    optimizer: Any


class Checkpoints:
    """The latest checkpoints of a run on disk. Incomplete checkpoints are ignored.

    Args:
        directory: created if it does not exist.
    """

    def __init__(self, directory: Path) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, create=True)
        self._manager = ocp.CheckpointManager(directory.expanduser().resolve(), options=options)

    @property
    def latest(self) -> int | None:
        """The step of the newest checkpoint, or None."""
        return self._manager.latest_step()

    def save(self, state: TrainState) -> None:
        """Writes a checkpoint; return when it is on disk."""
        self._manager.save(int(state.step), args=ocp.args.StandardSave(state), force=True)
        self._manager.wait_until_finished()

    def restore(self, like: TrainState) -> TrainState:
        """Returns the newest checkpoint, with the sharding of `like`.

        Raises:
            ModelConfigError: the checkpoint belongs to another model or optimizer.
        """
        targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
        try:
            return self._manager.restore(self.latest, args=ocp.args.StandardRestore(targets))
        except (ValueError, KeyError, TypeError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ModelConfigError(f"the run on disk does not fit this configuration ({reason})") from error

    def close(self) -> None:
        """Release the directory."""
        self._manager.close()
