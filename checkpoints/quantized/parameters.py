"""Converts stored quantized weights to a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import jax
import numpy as np
from jax.sharding import NamedSharding

from checkpoints.errors import CheckpointError
from checkpoints.placing import Reader, Shardings, sharding_of
from checkpoints.quantized.stored import INPUT_SCALE, Part, StoredWeight
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
    """Returns the parameters of one quantized weight by dotted path.

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
    *lead, outputs, _ = shape
    found: dict[str, Readable] = {}
    for part in parts:
        full, own = f"{path}.{part}", first.parts[part]
        shapes = {"values": tuple(shape), "channel_scale": (*lead, outputs), INPUT_SCALE: (*lead, outputs)}
        if part not in shapes:
            shapes[part] = (*lead, divisible_groups(full, own.groups, shape, shardings), outputs)
        target = jax.ShapeDtypeStruct(shapes[part], own.dtype)
        found[full] = target, _part_reader(source, [one.parts[part] for one in stored], target, release)
    return found


def own_rows(source: HFSource, values: np.ndarray) -> np.ndarray:
    """Returns a source's rows of a stored tensor."""
    if source.rows is None:
        return values
    return values.reshape(source.pieces, -1, *values.shape[1:])[:, slice(*source.rows)]


def divisible_groups(path: str, groups: int, shape: Sequence[int], shardings: Shardings) -> int:
    """Returns a number of groups of the inputs of a weight [*lead, outputs, inputs] that the devices can share."""
    rank, inputs, sharding = len(shape), shape[-1], sharding_of(shardings, path)
    if not isinstance(sharding, NamedSharding) or len(sharding.spec) < rank - 1 or sharding.spec[rank - 2] is None:
        return groups
    shards = sharding.mesh.shape[sharding.spec[rank - 2]]
    count = math.lcm(groups, shards)
    if inputs % count:
        raise CheckpointError(f"{path}: {groups} groups of {inputs} inputs cannot be divided over {shards} devices")
    return count


def _part_reader(
    source: HFSource, stored: Sequence[Part], target: jax.ShapeDtypeStruct, release: Callable[[str], None]
) -> Reader:
    """Returns the function that reads pieces of one part of one weight."""

    def one(part: Part, shape: tuple[int, ...]) -> np.ndarray:
        if not part.groups:
            return own_rows(source, part.read()).reshape(shape)
        *lead, groups, outputs = shape
        by_output = own_rows(source, np.swapaxes(part.read(), -1, -2))
        by_output = np.repeat(by_output, groups // by_output.shape[-1], axis=-1)
        return np.swapaxes(by_output.reshape(*lead, outputs, groups), -1, -2)

    @cache
    def whole() -> np.ndarray:
        shape = target.shape
        if not source.stack:
            return one(stored[0], shape)
        axes = 1 if len(stored) == shape[0] else 2
        stacked = np.empty(shape, target.dtype)
        for name, part, entry in zip(source.names, stored, np.ndindex(shape[:axes]), strict=True):
            stacked[entry] = one(part, shape[axes:])
            release(name)
        return stacked

    return lambda index: whole()[index]
