"""Our own checkpoint format: weights written by Orbax, which can be restored directly onto any sharding.

DIRECTORY/weights/          Orbax, one array per dotted parameter path
DIRECTORY/mamba_jax.json    our configuration; shapes and dtypes; written last, so its presence means "complete"
DIRECTORY/config.json, tokenizer files, generation_config.json    copies, where there were any
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding
from rich.console import Console

from checkpoints.config_json import config_from_json, config_to_json
from checkpoints.errors import CheckpointError, listing, one_line
from checkpoints.export import copy_small_files
from checkpoints.json_file import read_json
from checkpoints.placing import Shardings, abstract_parameters, held_dtype, sharding_of
from checkpoints.resolve import ORBAX_MARKER
from checkpoints.tensors.file_digest import FileHasher
from mamba_jax.config import HybridConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import weight_of

VERSION = 1
WEIGHTS = "weights"


@dataclass(frozen=True)
class Description:
    """The contents of `mamba_jax.json`."""

    config: HybridConfig
    dtype: str
    """The dtype of most parameters; some (the recurrence's) are kept in float32."""
    shapes: dict[str, tuple[int, ...]]
    """The shape of each parameter by dotted path."""
    narrow: dict[str, str]
    """The dtypes of the parts of quantized weights, by dotted path; these are never converted."""


def save_orbax(
    directory: str | Path,
    model: HybridModel,
    *,
    files_from: Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Path:
    """Writes a model with any sharding.

    Args:
        directory: created if necessary.
        model: the model to write.
        files_from: a directory whose config.json and tokenizer files are copied.
        overwrite: replace existing content; otherwise a directory with content is an error.
        progress: show progress.
    Returns:
        The directory.
    Raises:
        CheckpointError: the directory exists and has content, or cannot be written.
    """
    import orbax.checkpoint as ocp  # takes a second, and only this format needs it

    directory = Path(os.path.realpath(Path(directory).expanduser()))
    _prepare(directory, overwrite)
    arrays = {path: parameter.get_value() for path, parameter in parameters(model).items()}
    with Console(stderr=True, quiet=not progress).status(f"Writing {directory.name}"):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(directory / WEIGHTS, arrays)
        if jax.process_index() == 0:
            if files_from is not None:
                copy_small_files(files_from, directory, "config.json")
            description = {
                "version": VERSION,
                "dtype": model.dtype.name,
                "config": config_to_json(model.config),
                "shapes": {path: list(array.shape) for path, array in arrays.items()},
                "narrow": {path: array.dtype.name for path, array in arrays.items() if weight_of(path)},
            }
            (directory / ORBAX_MARKER).write_text(json.dumps(description, indent=1))
    return directory


def restore_orbax(
    directory: str | Path,
    *,
    dtype: Any,
    shardings: Shardings = None,
    progress: bool = False,
    hasher: FileHasher | None = None,
) -> HybridModel:
    """Reads a model that `save_orbax` wrote; each device reads its own pieces only.

    Args:
        directory: the directory that was written.
        dtype: of the model; arrays are converted while they are read.
        shardings: the sharding of each parameter.
        progress: show progress.
        hasher: hashes every file of the weights.
    Raises:
        CheckpointError: the directory is not such a checkpoint, is incomplete, or does not match its configuration.
    """
    import orbax.checkpoint as ocp

    directory = Path(os.path.realpath(Path(directory).expanduser()))
    description = read_description(directory)
    targets = stored_parameters(description, dtype)
    _check(directory, description, targets)
    if hasher is not None:
        weights = directory / WEIGHTS
        for file in filter(Path.is_file, sorted(weights.rglob("*"))):
            label, status = file.relative_to(weights).as_posix(), file.stat()
            hasher.add(file, {label: (0, status.st_size)}, status)
            hasher.start(file, label)
    # Without a sharding, Orbax would use the saved one, whose devices may not exist here.
    default = SingleDeviceSharding(jax.devices()[0])
    wanted = {}
    for path, target in targets.items():
        sharding = sharding_of(shardings, path) or default
        dtype = held_dtype(target.dtype, sharding)
        wanted[path] = jax.ShapeDtypeStruct(target.shape, dtype, sharding=sharding)
    with Console(stderr=True, quiet=not progress).status(f"Loading {directory.name}"):
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                arrays = checkpointer.restore(directory / WEIGHTS, wanted)
        except Exception as error:  # damaged files surface as errors of several libraries
            raise CheckpointError(f"{directory / WEIGHTS}: cannot be restored ({one_line(error)})") from error
    return HybridModel.from_parameters(description.config, arrays)


def read_description(directory: Path) -> Description:
    """Reads `mamba_jax.json`.

    Raises:
        CheckpointError: the file is absent, invalid, or of an unknown version.
    """
    path = directory / ORBAX_MARKER
    fields = read_json(path)
    if fields.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {fields.get('version')!r}, this program reads {VERSION}")
    try:
        shapes = {name: tuple(shape) for name, shape in fields["shapes"].items()}
        narrow = {name: str(dtype) for name, dtype in fields.get("narrow", {}).items()}
        return Description(config_from_json(fields["config"]), str(fields["dtype"]), shapes, narrow)
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: not a description of a model ({error})") from error


def stored_parameters(description: Description, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays to restore: the model's parameters, with the parts of quantized weights in their places."""
    targets = abstract_parameters(description.config, dtype)
    for path, kind in description.narrow.items():
        weight = weight_of(path)
        if weight is not None and path in description.shapes:
            targets.pop(weight, None)
            targets[path] = jax.ShapeDtypeStruct(description.shapes[path], jnp.dtype(kind))
    return targets


def _check(directory: Path, description: Description, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    wanted = {path: tuple(target.shape) for path, target in targets.items()}
    names = sorted(wanted.keys() | description.shapes.keys())
    wrong = [name for name in names if wanted.get(name) != description.shapes.get(name)]
    if wrong:
        stored, needed = ({n: list(shapes[n]) for n in shapes} for shapes in (description.shapes, wanted))
        shown = (f"{n}: stored {stored.get(n, 'none')}, needed {needed.get(n, 'none')}" for n in wrong)
        raise CheckpointError(f"{directory}: {len(wrong)} parameters do not fit: {listing(shown)}")
    if not (directory / WEIGHTS).is_dir():
        raise CheckpointError(f"{directory}: has no {WEIGHTS} folder")


def _prepare(directory: Path, overwrite: bool) -> None:
    try:
        if overwrite:
            shutil.rmtree(directory / WEIGHTS, ignore_errors=True)
            (directory / ORBAX_MARKER).unlink(missing_ok=True)
        elif directory.exists() and any(directory.iterdir()):
            raise CheckpointError(f"{directory}: exists already and is not empty")
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written ({error.strerror})") from error
