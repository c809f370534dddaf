"""A model as a Hugging Face directory: `read_parameters` the other way round."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints.placing import abstract_parameters
from checkpoints.tensor_set import SINGLE_FILE
from mamba_jax.config import HybridConfig
from mamba_jax.families import weight_names
from mamba_jax.families.base import HFSource

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def hugging_face_tensors(config: HybridConfig, values: Mapping[str, Any], *, only: str = "") -> dict[str, np.ndarray]:
    """Weights by dotted path as the tensors that a Hugging Face checkpoint of the family has, in float32.

    Those only whose path begins with `only`.
    """
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config, np.float32).items()}
    tensors: dict[str, np.ndarray] = {}
    wholes: dict[tuple[str, ...], tuple[HFSource, np.ndarray]] = {}
    for path, source in weight_names(config).items():
        if not path.startswith(only):
            continue
        value, stored = np.asarray(values[path], np.float32), source.stored(shapes[path])
        if source.rows is None:
            tensors |= {name: part.reshape(stored) for name, part in _parts(source, value)}
        else:
            _, whole = wholes.setdefault(source.names, (source, np.empty(stored, np.float32)))
            pieces = whole.reshape(source.pieces, -1, *stored[1:])
            rows = slice(*source.rows)
            pieces[:, rows] = value.reshape(pieces[:, rows].shape)
    for names, (source, whole) in wholes.items():
        tensors |= zip(names, np.split(whole, np.cumsum(source.cuts)[:-1]) if source.cuts else [whole], strict=True)
    return tensors


def _parts(source: HFSource, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    if source.stack:
        return list(zip(source.names, value.reshape(len(source.names), -1), strict=True))
    return [(source.names[0], value)]


def write_hugging_face(
    directory: Path,
    config: HybridConfig,
    values: Mapping[str, Any],
    hf_config: Mapping[str, Any],
    *,
    dtype: str = "bfloat16",
    files_from: Path | None = None,
) -> Path:
    """Write `config.json`, one safetensors file, and copies of a tokenizer's files.

    Args:
        directory: made if need be.
        config: of the model.
        values: weights by dotted path.
        hf_config: what config.json shall hold; `dtype` is added.
        dtype: of the tensors: float32 or bfloat16. What steers recurrences and routers is stored in it too.
        files_from: a directory whose other .json and .jinja files are copied along.
    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.astype(_DTYPES[dtype]) for name, value in hugging_face_tensors(config, values).items()}
    if config.tie_word_embeddings:
        # Not every family in transformers ties them though config.json says so; then it looks for this name.
        tensors["lm_head.weight"] = np.asarray(values["embed.weight"], np.float32).astype(_DTYPES[dtype])
    save_file(tensors, directory / SINGLE_FILE, {"format": "pt"})
    (directory / SINGLE_FILE).chmod(0o644)
    (directory / "config.json").write_text(json.dumps({**hf_config, "dtype": dtype}, indent=1) + "\n")
    if files_from is not None:
        for path in [*files_from.glob("*.json"), *files_from.glob("*.jinja")]:
            if path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, directory / path.name)
    return directory
