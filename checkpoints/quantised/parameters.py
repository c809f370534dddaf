"""Converts stored quantised weights to a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from checkpoints.errors import CheckpointError
from checkpoints.placing import Index, Reader, Shardings, sharding_of
from checkpoints.quantised.stored import INPUT_SCALE, Part, StoredWeight
from mamba_jax.families.base import HFSource

Readable = tuple[jax.ShapeDtypeStruct, Reader]
"""A parameter, and the function that reads it."""


def parts_of(
    path: str,
    shape: tuple[int, ...],
    source: HFSource,
    stored: Sequence[StoredWeight],
    shardings: Shardings,
    *,
    release: Callable[[str], None],
) -> dict[str, Readable]:
    """Returns the parameters of one quantised weight by dotted path.

    Args:
        path: of the weight.
        shape: of the weight.
        source: how the weight is made from stored ones: all rows or some, or stacked.
        stored: one for each name of the source, of equal form.
        shardings: the sharding of parameters. Groups that several devices would share are split, with the same scale.
        release: called with the name of a stored weight whose values have been copied.
    """
    first = stored[0]
    # Publishers omit the input scale of modules that their calibration data never used; then the weight has none.
    parts = [part for part in first.parts if part != INPUT_SCALE or all(part in one.parts for one in stored)]
    return {
        f"{path}.{part}": _readable(
            f"{path}.{part}", part, shape, source, [one.parts[part] for one in stored], shardings, release
        )
        for part in parts
    }


def _readable(
    path: str,
    part: str,
    shape: tuple[int, ...],
    source: HFSource,
    stored: Sequence[Part],
    shardings: Shardings,
    release: Callable[[str], None],
) -> Readable:
    *lead, outputs, inputs = shape
    groups = stored[0].groups
    if part == "values":
        own: tuple[int, ...] = tuple(shape)
    elif part in ("channel_scale", "input_scale"):
        own = (*lead, outputs)
    else:
        groups = divisible_groups(path, groups, inputs, sharding_of(shardings, path), len(shape))
        own = (*lead, groups, outputs)
    target = jax.ShapeDtypeStruct(own, stored[0].dtype)
    by_groups = len(own) == len(shape) and part != "values"
    return target, _PartReader(source, stored, target, release, by_groups=by_groups)


def divisible_groups(path: str, groups: int, inputs: int, sharding: Sharding | None, rank: int) -> int:
    """Returns a number of groups that the devices can share."""
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < rank - 1 or sharding.spec[rank - 2] is None:
        return groups
    count = math.lcm(groups, sharding.mesh.size)
    if inputs % count:
        raise CheckpointError(
            f"{path}: {groups} groups of {inputs} inputs cannot be divided over {sharding.mesh.size} devices"
        )
    return count


class _PartReader:
    """Reads pieces of one part of one weight."""

    def __init__(
        self,
        source: HFSource,
        stored: Sequence[Part],
        target: jax.ShapeDtypeStruct,
        release: Callable[[str], None],
        *,
        by_groups: bool,
    ) -> None:
        self._source, self._stored, self._target, self._by_groups = source, stored, target, by_groups
        self._release = release
        self._whole: np.ndarray | None = None

    def __call__(self, index: Index) -> np.ndarray:
        if self._whole is None:
            self._whole = self._read()
        return self._whole[index]

    def _read(self) -> np.ndarray:
        shape = self._target.shape
        if not self._source.stack:
            return self._one(self._stored[0], shape)
        axes = 1 if len(self._stored) == shape[0] else 2
        stacked = np.empty(shape, self._target.dtype)
        for name, part, entry in zip(self._source.names, self._stored, np.ndindex(shape[:axes]), strict=True):
            stacked[entry] = self._one(part, shape[axes:])
            self._release(name)
        return stacked

    def _one(self, part: Part, shape: tuple[int, ...]) -> np.ndarray:
        if not self._by_groups:
            return self._rows(part.read()).reshape(shape)
        *lead, groups, outputs = shape
        by_output = self._rows(np.swapaxes(part.read(), -1, -2))
        by_output = np.repeat(by_output, groups // by_output.shape[-1], axis=-1)
        return np.swapaxes(by_output.reshape(*lead, outputs, groups), -1, -2)

    def _rows(self, values: np.ndarray) -> np.ndarray:
        if self._source.rows is None:
            return values
        return values.reshape(self._source.pieces, -1, *values.shape[1:])[:, slice(*self._source.rows)]
