"""Random weights for any configuration, as fast as memory can be written."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping

import jax
import numpy as np

from checkpoints.initial import initial_values
from checkpoints.placing import Index, Reader, Shardings, nbytes, place, progress_bar, sharding_of
from checkpoints.quantised.rounding import Selection, rounded

# Drawing billions of numbers on a host takes minutes, so they are drawn once and used again and again. A prime number
# of them, so that the rows of a matrix do not repeat.
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
    """Make every parameter; equal seeds give equal weights, however they are sharded.

    Args:
        parameters: shape and dtype by dotted path.
        seed: of the draws.
        tied: the embedding is the output head too.
        selection: weights that are to be quantised.
        shardings: where each parameter goes.
        progress: show a bar.
    """
    rng = np.random.default_rng(seed)
    normal, uniform = rng.standard_normal(PERIOD, np.float32), rng.random(PERIOD, np.float32)
    result = {}
    with progress_bar("Drawing weights", sum(map(nbytes, parameters.values())), progress) as advance:
        for path, target in parameters.items():
            reader: Reader = _DummyParameter(path, target.shape, normal, uniform, tied)
            rounding = None if selection is None else selection.of(path, target.shape)
            parts = rounded(path, target, reader, rounding, shardings) if rounding else {path: (target, reader)}
            for part, (own, own_reader) in parts.items():
                result[part] = place(own, own_reader, sharding_of(shardings, part))
            advance(nbytes(target))
    return result


class _DummyParameter:
    """Makes pieces of one parameter: rows are made as needed, other axes are cut."""

    def __init__(self, path: str, shape: tuple[int, ...], normal: np.ndarray, uniform: np.ndarray, tied: bool) -> None:
        self._path = path
        self._shape = shape
        self._normal = normal
        self._uniform = uniform
        self._tied = tied

    def __call__(self, index: Index) -> np.ndarray:
        first, last, _ = index[0].indices(self._shape[0])
        offset = zlib.crc32(self._path.encode()) + first * math.prod(self._shape[1:])

        def draw(numbers: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
            start = offset % PERIOD
            return np.resize(np.concatenate([numbers[start:], numbers[:start]]), shape)

        shape = (last - first, *self._shape[1:])
        values = initial_values(
            self._path,
            shape,
            lambda shape: draw(self._normal, shape),
            lambda shape: draw(self._uniform, shape),
            self._tied,
        )
        return values[(slice(None), *index[1:])]
