"""The recipe of a run, kept in its folder: a run is resumed with the same settings and corpus, or not at all."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import Array, Int

from mamba_jax.config import ModelConfigError
from mamba_jax.train.config import TrainConfig

RECIPE = "recipe.json"
_MAY_DIFFER = {
    "accumulate",
    "rematerialize",
    "shard_weights",
    "log_every",
    "save_every",
    "validate_every",
    "validation_sequences",
    "data.corpus",
    "data.validation",
}
"""Settings that change no data, and weights by rounding at most. The corpus is compared by its digest, not its path."""
_TOKENIZER, _DATA = "tokenizer", ("tokens.npz", "rollouts.npz")
"""The folder and the files that commands prepare before the first step."""
_PREPARED_FROM = ("model", "data.", "corpus", "rollouts", "seed")
"""What these depend on."""


def keep_recipe(directory: Path, settings: TrainConfig, **inputs: str | None) -> None:
    """Writes `recipe.json`, or compares it with the one that the folder has.

    A setting that the file lacks, because it is newer, has its default. With a stable schedule, `steps` and
    `optimizer.decay_steps` may differ: the decay starts later. A folder without a step is no run yet: another recipe
    replaces its own, and data prepared from another corpus or model is deleted.

    Args:
        directory: of the run; created if it does not exist.
        settings: of the run.
        inputs: what else the run reads, by name: the digest of the corpus, the model to start from. None: not known,
            and not compared.
    Raises:
        ModelConfigError: the folder has a run with other settings or inputs, or its recipe cannot be read.
    """
    wanted = json.loads(json.dumps({"settings": dataclasses.asdict(settings), **inputs}))
    path = directory / RECIPE
    if path.is_file():
        try:
            kept = json.loads(path.read_text())
            before, after = dict(_flat(kept["settings"])), dict(_flat(wanted["settings"]))
            defaults = dict(_flat(json.loads(json.dumps(dataclasses.asdict(TrainConfig())))))
            before |= {name: value for name, value in defaults.items() if name in after and name not in before}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelConfigError(f"{path}: cannot be read ({error}); use another --output") from error
        allowed = set(_MAY_DIFFER)
        if settings.optimizer.schedule == "stable":
            allowed |= {"steps", "optimizer.decay_steps"}
        differences = [
            f"{name} was {before.get(name)!r}, is {after.get(name)!r}"
            for name in sorted(before.keys() | after.keys())
            if name not in allowed and before.get(name) != after.get(name)
        ]
        for name, value in inputs.items():
            if value is None:
                wanted[name] = kept.get(name)
            elif kept.get(name) not in (None, value):
                differences.append(f"{name.replace('_', ' ')} was {kept[name]}, is {value}")
        if differences and not any(path.name.isdigit() for path in (directory / CHECKPOINTS).glob("*")):
            if any(difference.startswith(_PREPARED_FROM) for difference in differences):
                shutil.rmtree(directory / _TOKENIZER, ignore_errors=True)
                for name in _DATA:
                    (directory / name).unlink(missing_ok=True)
        elif differences:
            raise ModelConfigError(
                f"{directory} has a run with another recipe: {'; '.join(differences)}; use another --output"
            )
    elif directory.exists() and (
        not directory.is_dir() or {path.name for path in directory.iterdir()} - {CHECKPOINTS, "lost+found"}
    ):
        raise ModelConfigError(f"{directory}: exists, and is neither empty nor the directory of a run; use another one")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(wanted, indent=1) + "\n")


def _flat(fields: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted name; mappings without fields of their own (an empty mixture) count as values."""
    for name, value in fields.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield before + name, value


CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints."""
KEPT_CHECKPOINTS = 2


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state of a run, except for its settings and data."""

    step: Int[Array, ""]
    """Steps done."""
    values: dict[str, Array]
    """The trained weights in float32, by dotted path."""
    optimizer: Any


def open_checkpoints(directory: Path) -> ocp.CheckpointManager:
    """Opens the latest checkpoints of a run, without incomplete ones; creates the directory if it does not exist."""
    options = ocp.CheckpointManagerOptions(max_to_keep=KEPT_CHECKPOINTS, create=True)
    return ocp.CheckpointManager(directory.expanduser().resolve(), options=options)


def save_state(checkpoints: ocp.CheckpointManager, state: TrainState) -> None:
    """Writes a checkpoint; returns when it is on disk."""
    checkpoints.save(int(state.step), args=ocp.args.StandardSave(state), force=True)
    checkpoints.wait_until_finished()


def restore_state(checkpoints: ocp.CheckpointManager, like: TrainState) -> TrainState:
    """Returns the newest checkpoint, with the sharding of `like`.

    Raises:
        ModelConfigError: the checkpoint belongs to another model or optimizer.
    """
    targets = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    try:
        return checkpoints.restore(checkpoints.latest_step(), args=ocp.args.StandardRestore(targets))
    except (ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelConfigError(f"the run on disk does not fit this configuration ({reason})") from error
