"""Random weights for any configuration, generated at about the speed of memory writes."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from checkpoints.initial import initial_values
from checkpoints.placing import Index, Shardings, nbytes, place, progress_bar, sharding_of
from checkpoints.quantised.rounding import Selection, rounded

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
        selection: weights to quantise.
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
