"""A Hugging Face directory written anew, tensor by tensor, with its weights in few bits; names stay as they are."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from checkpoints.errors import CheckpointError, listing
from checkpoints.placing import abstract_parameters
from checkpoints.quantised.rounding import Rounding, Selection
from checkpoints.quantised.stored import Wrong
from checkpoints.quantised.writing import description_of, tensors_of
from checkpoints.tensor_set import INDEX_FILE, TensorSet
from mamba_jax.config import HybridConfig
from mamba_jax.families.base import HFSource

FILE_BYTES = 2 << 30
"""Of tensors in one file, which are on the host together; a larger tensor has a file of its own."""


def rewrite_hugging_face(
    source: Path,
    target: Path,
    config: HybridConfig,
    fields: Mapping[str, Any],
    sources: Mapping[str, HFSource],
    selection: Selection,
    *,
    dtype: np.dtype | None = None,
) -> Path:
    """Write a directory whose weights are those that loading the source with this selection would make.

    Args:
        source: a Hugging Face directory with wide weights.
        target: a directory that does not exist, or is empty.
        config: of the model.
        fields: the source's config.json.
        sources: where the model's parameters are found.
        selection: what is rounded, and how.
        dtype: of what stays wide; None: each tensor's own. What the model keeps in float32 stays so.
    Returns:
        The new directory.
    Raises:
        CheckpointError: the target is in use, or the form has no place for a weight that is to be rounded.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists already and is not empty")
    tensors = TensorSet(source)
    found = {path: each.find(tensors.names) for path, each in sources.items()}
    roundings = _by_tensor(config, found, selection)
    wanted = {} if dtype is None else _dtypes(config, found, dtype)
    target.mkdir(parents=True, exist_ok=True)
    files = _Files(target)
    for name in sorted(tensors.names):
        rounding, value = roundings.get(name), tensors.view(name)
        if rounding is None:
            files.add(name, value.astype(wanted.get(name, value.dtype)))
        else:
            try:
                parts = tensors_of(rounding, value)
            except Wrong as error:
                raise CheckpointError(f"{name}: {error}; exclude it, or write Orbax") from None
            for suffix, part in parts.items():
                files.add(f"{_module(name)}.{suffix}", part)
        tensors.release(name)
    files.close()
    rounded = {_module(name): rounding for name, rounding in roundings.items()}
    wide = {_module(name) for name in tensors.names if name.endswith(".weight") and len(tensors.shape(name)) == 2}
    described = {**fields, "quantization_config": description_of(rounded, wide - set(rounded))}
    (target / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    for path in [*source.glob("*.json"), *source.glob("*.jinja"), *source.glob("*.jsonl")]:
        if path.name not in ("config.json", INDEX_FILE):
            shutil.copyfile(path, target / path.name)
    return target


def _by_tensor(config: HybridConfig, found: Mapping[str, HFSource | None], selection: Selection) -> dict[str, Rounding]:
    """How each stored tensor is rounded."""
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config, np.float32).items()}
    of_tensor: dict[str, dict[str, Rounding | None]] = {}
    for path, source in found.items():
        for name in source.names if source is not None else ():
            of_tensor.setdefault(name, {})[path] = selection.of(path, shapes[path])
    roundings: dict[str, Rounding] = {}
    for name, each in of_tensor.items():
        kinds = set(each.values())
        if len(kinds) > 1:
            wide = [path for path, rounding in each.items() if rounding is None]
            raise CheckpointError(
                f"{name} holds several weights, of which {listing(wide)} would stay wide: exclude all"
            )
        (rounding,) = kinds
        if rounding is None:
            continue
        if not name.endswith(".weight"):
            raise CheckpointError(f"{name}: is no module's weight, which is all that this form has; write Orbax")
        roundings[name] = rounding
    return roundings


def _dtypes(config: HybridConfig, found: Mapping[str, HFSource | None], dtype: np.dtype) -> dict[str, np.dtype]:
    targets = abstract_parameters(config, dtype)
    return {name: targets[path].dtype for path, source in found.items() if source for name in source.names}


def _module(name: str) -> str:
    return re.sub(r"\.weight$", "", name)


class _Files:
    """Writes tensors to numbered files of a bounded size, and their index."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._held: dict[str, np.ndarray] = {}
        self._weight_map: dict[str, str] = {}
        self._number = self._total = 0

    def add(self, name: str, value: np.ndarray) -> None:
        if self._held and sum(each.nbytes for each in self._held.values()) + value.nbytes > FILE_BYTES:
            self._write()
        self._held[name] = np.ascontiguousarray(value)
        self._total += value.nbytes

    def close(self) -> None:
        self._write()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._weight_map}
        (self._directory / INDEX_FILE).write_text(json.dumps(index, indent=1) + "\n")

    def _write(self) -> None:
        self._number += 1
        file = f"model-{self._number:05d}.safetensors"
        save_file(self._held, self._directory / file, {"format": "pt"})
        (self._directory / file).chmod(0o644)
        self._weight_map |= dict.fromkeys(self._held, file)
        self._held = {}
