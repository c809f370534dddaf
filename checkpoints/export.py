"""Writes a model as a Hugging Face directory: the inverse of `read_parameters`."""

from __future__ import annotations

import collections
import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from checkpoints.errors import CheckpointError
from checkpoints.json_file import read_json
from checkpoints.placing import abstract_parameters
from checkpoints.tensors.tensor_set import TensorFiles
from checkpoints.tokenizer import MORE_TEMPLATES, TOKENIZER_FILES
from mamba_jax.config import HybridConfig
from mamba_jax.families import as_stored, config_from_hf, weight_names
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import weight_of


def stored_tensors(
    config: HybridConfig, values: Mapping[str, Any], *, only: str = ""
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a Hugging Face checkpoint one by one, each in the dtype of its weights.

    The host holds only tensors that are not complete yet: one, unless a tensor holds several parameters.

    Args:
        config: of the model.
        values: weights by dotted path.
        only: prefix of the paths to include.
    """
    shapes = {path: leaf.shape for path, leaf in abstract_parameters(config, np.float32).items()}
    sources = {path: source for path, source in weight_names(config).items() if path.startswith(only)}
    left = collections.Counter(source.names for source in sources.values())
    wholes: dict[tuple[str, ...], np.ndarray] = {}
    for path, source in sources.items():
        value, stored = np.asarray(values[path]), source.stored(shapes[path])
        if source.rows is None:
            parts = value.reshape(len(source.names), -1) if source.stack else [value]
            yield from ((name, part.reshape(stored)) for name, part in zip(source.names, parts, strict=False))
            continue
        whole = wholes.setdefault(source.names, np.empty(stored, value.dtype))
        pieces = whole.reshape(source.pieces, -1, *stored[1:])
        rows = slice(*source.rows)
        pieces[:, rows] = value.reshape(pieces[:, rows].shape)
        left[source.names] -= 1
        if not left[source.names]:
            del wholes[source.names]
            cuts = np.split(whole, np.cumsum(source.cuts)[:-1]) if source.cuts else [whole]
            yield from zip(source.names, cuts, strict=True)


def write_hugging_face(
    directory: Path,
    config: HybridConfig,
    values: Mapping[str, Any],
    hf_config: Mapping[str, Any],
    *,
    dtype: str | None = None,
    files_from: Path | None = None,
) -> Path:
    """Writes `config.json`, safetensors files, and copies of a tokenizer's files.

    Args:
        directory: created if necessary.
        config: of the model.
        values: weights by dotted path.
        hf_config: the contents of config.json.
        dtype: of all tensors, and in config.json: parameters of recurrences and routers have it, too. None: each tensor
            keeps its own.
        files_from: a directory whose tokenizer, chat templates and sampling defaults are copied.
    Returns:
        The directory.
    """
    directory.mkdir(parents=True, exist_ok=True)
    files = TensorFiles(directory)
    if dtype is not None:
        values = {path: np.asarray(value).astype(np.dtype(dtype)) for path, value in values.items()}
        hf_config = {**hf_config, "dtype": dtype}
    for name, value in stored_tensors(config, values):
        files.add(name, value)
    if config.tie_word_embeddings:
        # Some families in transformers ignore the tie in config.json and look for this name.
        files.add("lm_head.weight", np.asarray(values["embed.weight"]))
    files.close()
    (directory / "config.json").write_text(json.dumps(hf_config, indent=1) + "\n")
    if files_from is not None:
        copy_small_files(files_from, directory)
    return directory


def save_hugging_face(directory: str | Path, model: HybridModel, like: str | Path, *, overwrite: bool = False) -> Path:
    """Writes a model as a Hugging Face directory that transformers reads, each weight in its own dtype.

    Args:
        directory: does not exist, or is empty.
        model: with wide weights.
        like: a directory of the same architecture, whose config.json, tokenizer and sampling defaults are copied.
        overwrite: `directory` may hold an earlier state of the same model.
    Returns:
        The directory.
    Raises:
        CheckpointError: the directory has content, `like` describes another model, or weights are quantized.
    """
    directory, like = Path(directory).expanduser(), Path(like)
    if not overwrite and directory.exists() and any(directory.iterdir()):
        raise CheckpointError(f"{directory}: exists already and is not empty")
    values = {path: leaf.get_value() for path, leaf in parameters(model).items()}
    if quantized := [path for path in values if weight_of(path)]:
        raise CheckpointError(f"{len(quantized)} weights are quantized ({quantized[0]}, ...): load the wide checkpoint")
    fields = read_json(like / "config.json")
    names = {name for source in weight_names(model.config).values() for name in source.names}
    if as_stored(config_from_hf(fields), names) != model.config:
        raise CheckpointError(f"{like / 'config.json'}: describes another model than the one to be saved")
    fields = {name: value for name, value in fields.items() if name != "torch_dtype"} | {"dtype": model.dtype.name}
    return write_hugging_face(directory, model.config, values, fields, files_from=like)


def copy_small_files(source: Path, target: Path, *more: str) -> None:
    """Copies the tokenizer, chat templates and sampling defaults of a checkpoint, and the files named in `more`.

    Nothing else: figures and data in its folder describe the original.
    """
    named = [path for name in ("generation_config.json", *TOKENIZER_FILES, *more) if (path := source / name).is_file()]
    for path in [*named, *source.glob(f"{MORE_TEMPLATES}/*.jinja")]:
        copy = target / path.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, copy)
