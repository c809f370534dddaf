"""Random weights for any configuration: parameters of a model, generated at about the speed of memory writes, and tiny
Hugging Face checkpoints, for tests and for the demo.

The values make a model behave like a trained one in kind: stable, and not degenerate. The recurrence starts as the
published Mamba-2 code starts it (dt log-uniform in [0.002, 0.1], A uniform in [1, 16]); matrices are normal with
1/sqrt(fan-in). Everything that usually starts at one or zero (norms, D, biases) is disturbed, because a model in which
these do nothing would hide their errors.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from safetensors.numpy import save_file

from checkpoints.placing import Index, Shardings, abstract_parameters, nbytes, place, progress_bar, sharding_of
from checkpoints.quantized.rounding import Selection, rounded
from checkpoints.tensors.tensor_set import SINGLE_FILE
from mamba_jax.config import HybridConfig
from mamba_jax.families import config_from_hf, weight_names

# Drawing billions of numbers takes minutes, so a prime number of them is drawn and repeated. Because it is prime, the
# rows of a matrix differ.
PERIOD = 1_048_573


def dummy_parameters(
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int = 0,
    tied: bool = False,
    selection: Selection | None = None,
    shardings: Shardings = None,
    progress: bool = False,
) -> dict[str, jax.Array]:
    """Makes every parameter; equal seeds give equal weights, however they are sharded.

    On accelerators the host sends `PERIOD` numbers per parameter, and the device repeats them. Quantized weights are
    rounded on the host.

    Args:
        parameters: shape and dtype by dotted path.
        seed: of the draws.
        tied: the embedding is the output head too.
        selection: weights to quantize.
        shardings: the sharding of each parameter.
        progress: show a bar.
    """
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal(PERIOD, np.float32), rng.random(PERIOD, np.float32)
    result = {}
    with progress_bar("Drawing weights", sum(map(nbytes, parameters.values())), progress) as advance:
        for path, target in parameters.items():
            rounding = None if selection is None else selection.of(path, target.shape)
            sharding = sharding_of(shardings, path)
            if rounding:
                wide = DummyParameter(path, target.shape, np.float32, *drawn, tied)
                for part, (own, reader) in rounded(path, target, wide, rounding, shardings).items():
                    result[part] = place(own, reader, sharding_of(shardings, part))
            else:
                parameter = DummyParameter(path, target.shape, target.dtype, *drawn, tied)
                if _platform(sharding) == "cpu":
                    result[path] = place(target, parameter, sharding)
                else:
                    result[path] = parameter.on_devices(sharding)
            advance(nbytes(target))
    return result


def _platform(sharding: Sharding | None) -> str:
    devices: Any = jax.devices() if sharding is None else list(sharding.device_set)
    return str(devices[0].platform)


class DummyParameter:
    """Makes pieces of one parameter, as a `Reader` on the host or by its devices: rows are made as needed, other axes
    are cut."""

    def __init__(
        self, path: str, shape: tuple[int, ...], dtype: Any, normal: np.ndarray, uniform: np.ndarray, tied: bool
    ) -> None:
        self._path, self._shape, self._dtype = path, shape, dtype
        self._normal, self._uniform, self._tied = normal, uniform, tied

    def __call__(self, index: Index) -> np.ndarray:
        """Returns the piece `parameter[index]`."""
        period, shape = self._rows(index)
        return np.resize(period, shape)[(slice(None), *index[1:])]

    def on_devices(self, sharding: Sharding | None) -> jax.Array:
        """Returns the parameter, each device's piece made by that device."""
        sharding = sharding or SingleDeviceSharding(jax.devices()[0])
        pieces = []
        for device, index in sharding.addressable_devices_indices_map(self._shape).items():
            assert index is not None
            period, shape = self._rows(index)
            cut = tuple(part.indices(size)[:2] for part, size in zip(index[1:], shape[1:], strict=True))
            pieces.append(_repeated(jax.device_put(period, device), shape, cut))
        return jax.make_array_from_single_device_arrays(self._shape, sharding, pieces)

    def _rows(self, index: Index) -> tuple[np.ndarray, tuple[int, ...]]:
        """Returns the numbers that rows of a piece repeat, and the shape of these rows before other axes are cut."""
        first, last, _ = index[0].indices(self._shape[0])
        shape = (last - first, *self._shape[1:])
        start = (zlib.crc32(self._path.encode()) + first * math.prod(self._shape[1:])) % PERIOD
        count = min(PERIOD, math.prod(shape))

        def draw(numbers: np.ndarray) -> np.ndarray:
            return np.concatenate([numbers[start:], numbers[:start]])[:count]

        values = initial_values(
            self._path, shape, lambda _: draw(self._normal), lambda _: draw(self._uniform), self._tied
        )
        return values.astype(self._dtype), shape


@partial(jax.jit, static_argnums=(1, 2))
def _repeated(period: jax.Array, shape: tuple[int, ...], cut: tuple[tuple[int, int], ...]) -> jax.Array:
    """Returns `period` repeated to fill `shape`; all axes after the first are cut to its sizes."""
    return jnp.resize(period, shape)[(slice(None), *(slice(*bounds) for bounds in cut))]


Draw = Callable[[tuple[int, ...]], np.ndarray]

_DT_RANGE = (0.002, 0.1)
_A_RANGE = (1.0, 16.0)
# name (its last parts) -> mean and standard deviation
_DISTURBED: tuple[tuple[str, float, float], ...] = (
    (r"(^|\.)[Dd]$", 1.0, 0.1),
    (r"e_score_correction_bias$|correction_bias$", 0.0, 0.1),
    (r"norm[^.]*(\.weight|\.scale)?$", 1.0, 0.1),
    (r"conv[^.]*\.weight$", 0.0, 0.3),
    (r"bias$", 0.0, 0.02),
)


def initial_values(name: str, shape: tuple[int, ...], normal: Draw, uniform: Draw, tied: bool = False) -> np.ndarray:
    """Values for one tensor, chosen by its name (ours or Hugging Face's).

    Args:
        name: dotted; the last parts decide.
        shape: of the result.
        normal: draws standard normals of a shape.
        uniform: draws uniforms in [0, 1).
        tied: the embedding is the output head too, so it is scaled as a head.
    """
    if name.endswith("dt_bias"):
        low, high = map(math.log, _DT_RANGE)
        dt = np.exp(low + (high - low) * uniform(shape))
        return dt + np.log(-np.expm1(-dt))  # the inverse of softplus
    if name.lower().endswith("a_log"):
        low, high = _A_RANGE
        return np.log(low + (high - low) * uniform(shape))
    if re.search(r"embed[^.]*(\.weight|\.embedding)?$", name):
        return normal(shape) * (1 / math.sqrt(shape[-1]) if tied else 1.0)
    for pattern, mean, deviation in _DISTURBED:
        if re.search(pattern, name):
            return mean + deviation * normal(shape)
    return normal(shape) / math.sqrt(shape[-1])


def random_tensors(hf_config: Mapping[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns random tensors of a Hugging Face checkpoint, float32. A tensor depends on the seed and on its name only.

    Args:
        hf_config: what `config.json` would hold.
        seed: equal seeds give equal tensors.
    """
    config, found = config_from_hf(hf_config), {}
    for name, shape in tensor_shapes(config).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        values = initial_values(name, shape, rng.standard_normal, rng.random, config.tie_word_embeddings)
        found[name] = values.astype(np.float32)
    return found


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
    tokenizer: str | None = None,
) -> Path:
    """Writes a random Hugging Face directory: `config.json`, safetensors and, if given, a tokenizer.

    Args:
        directory: made if need be.
        hf_config: the contents of `config.json`; `dtype` is added.
        seed: equal seeds give equal weights.
        dtype: `float32`, `bfloat16` or `float16`.
        tokenizer: the text of a `tokenizer.json`.
    Returns:
        The directory.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**hf_config, "dtype": dtype}, indent=1))
    if tokenizer is not None:
        (directory / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    content = {name: tensor.astype(np.dtype(dtype)) for name, tensor in sorted(random_tensors(hf_config, seed).items())}
    save_file(content, directory / SINGLE_FILE, {"format": "pt"})
    return directory
