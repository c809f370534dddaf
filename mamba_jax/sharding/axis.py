"""The mesh axis that layers are divided over."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from mamba_jax.config import ModelConfigError

AXIS = "tp"
"""Name of the one axis of the mesh."""


def make_mesh(shards: int, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of the first `shards` devices (of all processes), or of those given.

    Raises:
        ModelConfigError: there are not as many.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < shards:
        raise ModelConfigError(f"tensor_parallel_size {shards}: JAX sees {len(found)} {found[0].platform} device(s)")
    return Mesh(np.array(found[:shards]), (AXIS,), axis_types=(AxisType.Auto,))


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """While a program is traced under it, the model's mixers divide their work over the mesh. None: nothing changes."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def axis_mesh() -> Any:
    """The mesh of the program being traced, if that is one to divide layers over; otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if tuple(mesh.axis_names) == (AXIS,) and mesh.shape[AXIS] > 1 else None


def axis_index() -> Int[Array, ""]:
    """Which piece this device has; inside of `across` only."""
    return jnp.asarray(lax.axis_index(AXIS))


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_last(x: Array) -> Array:
    """Tells the compiler to have the last dimension of x divided over the devices, if it divides evenly."""
    mesh = axis_mesh()
    if mesh is None or x.shape[-1] % mesh.shape[AXIS]:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 1), AXIS))


def keep_whole(x: Array) -> Array:
    """Tells the compiler to have x whole on every device from here on; nothing outside of a mesh."""
    return x if axis_mesh() is None else lax.with_sharding_constraint(x, PartitionSpec())
