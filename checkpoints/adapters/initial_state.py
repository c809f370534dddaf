"""Learned initial states: the state of a model's recurrent layers before a request's first token, instead of zeros.

The file `initial_state.safetensors` has, for the block with each `index` of the model's pattern:

* `layers.{index}.state`: the state of the recurrence;
* `layers.{index}.window`: the inputs of its causal convolutions, oldest first, [width - 1, channels]. The parts of a
  convolution that the model stores apart (such as x and B C) are concatenated along the channels, in the order in which
  the mixer declares them.

Shapes are those of one slot, as the model's configuration declares them (`HybridConfig.state`), whatever the devices.
Tensors are float32. A tensor that is missing is zeros, and at least one is needed. The metadata has `format`, `version`
and `model_type`, the name of the model's family.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError
from checkpoints.json_file import MOST_JSON
from checkpoints.tensors.safetensors_file import SafetensorsFile
from mamba_jax.config import HybridConfig, Role, StateArray, StateUnit

INITIAL_STATE_FILE = "initial_state.safetensors"

LayerState = Mapping[str, Float[np.ndarray, "..."]]
"""`state` and `window` of a layer, or one of them."""

_FORMAT = {"format": "mamba-jax-initial-state", "version": "1"}
_NAME = re.compile(r"layers\.(?P<index>0|[1-9][0-9]{0,5})\.(?P<part>state|window)")


@dataclass(frozen=True)
class InitialState:
    """A learned initial state, for one model."""

    layers: Mapping[int, LayerState]
    """By the index of the layer among the model's blocks, in float32."""
    digest: str
    """Of all names, shapes and numbers: states with equal digests are equal."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all tensors."""
        return sum(value.size for layer in self.layers.values() for value in layer.values())

    def slot_arrays(self, config: HybridConfig) -> tuple[dict[str, np.ndarray], ...]:
        """The content of a slot: for each layer with a part in slots, in model order, its arrays by their names in the
        store. Missing tensors are zeros."""
        found = []
        for index, kind in enumerate(config.pattern):
            arrays, layer = config.state(kind, StateUnit.SLOT), self.layers.get(index, {})
            if not arrays:
                continue
            own = {array.name: np.zeros(array.shape, np.float32) for array in arrays}
            for part, members in _members(arrays).items():
                if members and part in layer:
                    ends = np.cumsum([array.shape[-1] for array in members])[:-1]
                    pieces = np.split(layer[part], ends, axis=-1)
                    own |= {array.name: piece for array, piece in zip(members, pieces, strict=True)}
            found.append(own)
        return tuple(found)


def initial_state_shapes(config: HybridConfig) -> dict[int, dict[str, tuple[int, ...]]]:
    """Returns the shapes of `state` and `window` of every recurrent layer, by its index among the model's blocks."""
    shapes = {index: _shapes(config.state(kind, StateUnit.SLOT)) for index, kind in enumerate(config.pattern)}
    return {index: found for index, found in shapes.items() if found}


def read_initial_state(path: str | Path, config: HybridConfig) -> InitialState:
    """Reads a learned initial state.

    Args:
        path: the file, or the directory that has it under the name `initial_state.safetensors`.
        config: of the model that the state was trained for.
    Raises:
        CheckpointError: the file cannot be read, or is of another format, version or model family; a tensor does not
            belong to the model or has another shape or dtype; or a number is not finite.
    """
    file = Path(path).expanduser()
    file = file / INITIAL_STATE_FILE if file.is_dir() else file
    stored = SafetensorsFile(file, MOST_JSON)
    for field, expected in (_FORMAT | {"model_type": config.family}).items():
        if (value := stored.metadata.get(field)) != expected:
            raise CheckpointError(f"{file}: {field} is {str(value)[:80]!r}: expected {expected!r}")
    shapes: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, entry in stored.entries.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise CheckpointError(f"{file}: tensor {name[:80]} is not layers.INDEX.state or layers.INDEX.window")
        if entry.dtype != "F32":
            raise CheckpointError(f"{file}: {name} is {entry.dtype}: expected F32")
        shapes.setdefault(int(match["index"]), {})[match["part"]] = entry.shape
    _check_shapes(str(file), shapes, config)  # before a number is read: so the model bounds what is read
    layers = {index: {part: stored.copy(f"layers.{index}.{part}") for part in parts} for index, parts in shapes.items()}
    _check_finite(str(file), layers)
    return InitialState(layers, digest_of(layers))


def write_initial_state(path: str | Path, layers: Mapping[int, LayerState], config: HybridConfig) -> Path:
    """Writes a learned initial state, and replaces an older one at once.

    Args:
        path: the directory, which is created if necessary.
        layers: `state` and `window` of each layer, or one of them, by the layer's index among the model's blocks. They
            are converted to float32.
        config: of the model.
    Returns:
        the path of the file.
    Raises:
        CheckpointError: the model does not have a layer or part, a shape is wrong, or a number is not finite.
    """
    folder = Path(path).expanduser()
    wide = {
        index: {part: np.ascontiguousarray(value, np.float32) for part, value in layer.items()}
        for index, layer in layers.items()
    }
    shapes = {index: {part: value.shape for part, value in layer.items()} for index, layer in wide.items()}
    _check_shapes("the initial state", shapes, config)
    _check_finite("the initial state", wide)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / INITIAL_STATE_FILE
    tensors = {f"layers.{index}.{part}": value for index, layer in wide.items() for part, value in layer.items()}
    unfinished = folder / f".{INITIAL_STATE_FILE}.{os.getpid()}"
    save_file(tensors, unfinished, _FORMAT | {"model_type": config.family})
    unfinished.chmod(0o644)
    os.replace(unfinished, file)
    return file


def parts_of(config: HybridConfig, index: int, arrays: Mapping[str, Any]) -> LayerState:
    """Returns `state` and `window` of one block from arrays by their names in the store.

    Args:
        index: of the block.
        arrays: by name. A part without arrays is left out; otherwise all its arrays are needed.
    """
    members = _members(config.state(config.pattern[index], StateUnit.SLOT))
    return {
        part: np.concatenate([arrays[array.name] for array in found], axis=-1)
        for part, found in members.items()
        if any(array.name in arrays for array in found)
    }


def _members(arrays: tuple[StateArray, ...]) -> dict[str, list[StateArray]]:
    """Returns the arrays of a layer that make up its `state` and its `window`."""
    roles = {"state": Role.ACCUMULATED, "window": Role.WINDOW}
    return {part: [array for array in arrays if array.role is role] for part, role in roles.items()}


def _shapes(arrays: tuple[StateArray, ...]) -> dict[str, tuple[int, ...]]:
    members = {part: found for part, found in _members(arrays).items() if found}
    return {part: (*found[0].shape[:-1], sum(array.shape[-1] for array in found)) for part, found in members.items()}


def _check_shapes(what: str, found: Mapping[int, Mapping[str, tuple[int, ...]]], config: HybridConfig) -> None:
    shapes = initial_state_shapes(config)
    if not any(found.values()):
        raise CheckpointError(f"{what}: has no tensors")
    for index, layer in found.items():
        for part, own in layer.items():
            name, shape = f"layers.{index}.{part}", shapes.get(index, {}).get(part)
            if shape is None:
                raise CheckpointError(f"{what}: the model has no {name}; recurrent layers are {sorted(shapes)}")
            if own != shape:
                raise CheckpointError(f"{what}: {name} is {list(own)}: expected {list(shape)}")


def _check_finite(what: str, layers: Mapping[int, LayerState]) -> None:
    for index, layer in layers.items():
        for part, value in layer.items():
            if not np.isfinite(value).all():
                raise CheckpointError(f"{what}: layers.{index}.{part} has numbers that are not finite")


def digest_of(layers: Mapping[Any, LayerState]) -> str:
    """Returns a digest of all names, shapes and numbers: layers with equal digests are equal."""
    digest = hashlib.sha256()
    for index, layer in sorted(layers.items()):
        for part, value in sorted(layer.items()):
            digest.update(json.dumps([index, part, value.shape]).encode())
            digest.update(np.ascontiguousarray(value).data)
    return digest.hexdigest()
