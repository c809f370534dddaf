"""Rewrites a Hugging Face directory, tensor by tensor, in another dtype or quantized."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError, listing
from checkpoints.export import copy_small_files
from checkpoints.placing import abstract_parameters
from checkpoints.quantised.rounding import Rounding, Selection
from checkpoints.quantised.stored import InvalidTensor
from checkpoints.quantised.writing import description_of, tensors_of
from checkpoints.tensors.tensor_set import TensorFiles, TensorSet
from mamba_jax.config import HybridConfig
from mamba_jax.families.base import HFSource


def rewrite_hugging_face(
    source: Path,
    target: Path,
    config: HybridConfig,
    fields: Mapping[str, Any],
    sources: Mapping[str, HFSource],
    selection: Selection | None,
    *,
    dtype: np.dtype | None = None,
) -> Path:
    """Writes a directory whose weights are those that loading the source with this selection would make.

    Names stay as they are.

    Args:
        source: a Hugging Face directory with wide weights.
        target: a directory that does not exist, or is empty.
        config: of the model.
        fields: the source's config.json.
        sources: where the model's parameters are found.
        selection: weights to round, and how; None: none.
        dtype: of tensors that are not rounded; None: their own dtype. Tensors that the model keeps in float32 stay so.
    Returns:
        The new directory.
    Raises:
        CheckpointError: the target is in use, or the format cannot store one of the rounded weights.
    """
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target}: exists already and is not empty")
    tensors = TensorSet(source)
    found = {path: each.find(tensors.names) for path, each in sources.items()}
    roundings = {} if selection is None else _by_tensor(config, found, selection)
    wanted = {} if dtype is None else _dtypes(config, found, dtype)
    target.mkdir(parents=True, exist_ok=True)
    files = TensorFiles(target)
    for name in sorted(tensors.names):
        rounding, value = roundings.get(name), tensors.view(name)
        if rounding is None:
            files.add(name, value.astype(wanted.get(name, value.dtype)))
        else:
            try:
                parts = tensors_of(rounding, value)
            except InvalidTensor as error:
                raise CheckpointError(f"{name}: {error}; exclude it, or write Orbax") from None
            for suffix, part in parts.items():
                files.add(f"{_module(name)}.{suffix}", part)
        tensors.release(name)
    files.close()
    described = dict(fields)
    if dtype is not None:
        described["dtype"] = dtype.name
    rounded = {_module(name): rounding for name, rounding in roundings.items()}
    wide = {_module(name) for name in tensors.names if name.endswith(".weight") and len(tensors.shape(name)) == 2}
    if selection is not None:
        described["quantization_config"] = description_of(rounded, wide - set(rounded))
    (target / "config.json").write_text(json.dumps(described, indent=1) + "\n")
    copy_small_files(source, target)
    return target


def _by_tensor(config: HybridConfig, found: Mapping[str, HFSource | None], selection: Selection) -> dict[str, Rounding]:
    """Returns how each stored tensor is rounded."""
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
