"""Tiny random checkpoints of any family, for tests and for the demo."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from checkpoints.dummy import initial_values
from checkpoints.placing import abstract_parameters
from checkpoints.tensors.tensor_set import INDEX_FILE, SINGLE_FILE
from mamba_jax.config import HybridConfig
from mamba_jax.families import config_from_hf, weight_names

_NUMPY = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class RandomTensors:
    """The random tensors of a Hugging Face checkpoint without files: each is drawn when it is read.

    A tensor depends on the seed and on its name only.

    Args:
        hf_config: what `config.json` would hold.
        seed: equal seeds give equal tensors.
        near_ties: if given, output rows 2i and 2i+1 differ by this relative amount only, so that every choice of a next
            token is a near-tie.
    """

    def __init__(self, hf_config: Mapping[str, Any], seed: int = 0, near_ties: float | None = None) -> None:
        self._config = config_from_hf(hf_config)
        self._seed = seed
        self._near_ties = near_ties
        self._shapes = tensor_shapes(self._config)

    @property
    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape."""
        return self._shapes[name]

    def view(self, name: str) -> np.ndarray:
        """Returns a tensor's values, float32."""
        shape, tied = self._shapes[name], self._config.tie_word_embeddings
        rng = np.random.default_rng([self._seed, zlib.crc32(name.encode())])
        values = initial_values(name, shape, rng.standard_normal, rng.random, tied).astype(np.float32)
        if self._near_ties is not None and ("lm_head" in name or (tied and "embed" in name)):
            pairs = shape[0] // 2
            values[1 : 2 * pairs : 2] = values[0 : 2 * pairs : 2] * np.float32(1 + self._near_ties)
        return values

    def release(self, name: str) -> None:
        """Does nothing: there is nothing to release."""


def tensor_shapes(config: HybridConfig) -> dict[str, tuple[int, ...]]:
    """Returns names and shapes of the tensors that a Hugging Face checkpoint of this model holds."""
    parameters = abstract_parameters(config, np.float32)
    sources = weight_names(config)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, source in sources.items():
        shapes |= source.shapes(parameters[path].shape)
    return shapes


def write_random(
    directory: str | Path,
    hf_config: Mapping[str, Any],
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    near_ties: float | None = None,
    rename: Callable[[str], str] = str,
    tokenizer: str | None = None,
) -> Path:
    """Writes a random Hugging Face directory: `config.json`, safetensors and, if given, a tokenizer.

    Args:
        directory: made if need be.
        hf_config: the contents of `config.json`; `dtype` is added.
        seed: equal seeds give equal weights.
        dtype: `float32`, `bfloat16` or `float16`.
        shards: number of safetensors files; more than one come with an index.
        near_ties: see `RandomTensors`.
        rename: applied to every tensor's name, for other spellings.
        tokenizer: the text of a `tokenizer.json`.
    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**hf_config, "dtype": dtype}, indent=1))
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    tensors = RandomTensors(hf_config, seed, near_ties)
    names = sorted(tensors.names)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = SINGLE_FILE if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        content = {rename(name): tensors.view(name).astype(_NUMPY[dtype]) for name in names[shard::shards]}
        save_file(content, directory / file, {"format": "pt"})
        weight_map |= dict.fromkeys(content, file)
    if shards > 1:
        size = sum(int(np.prod(tensors.shape(n))) for n in names) * _NUMPY[dtype].itemsize
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        (directory / INDEX_FILE).write_text(json.dumps(index, indent=1))
    return directory
