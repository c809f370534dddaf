"""The axes of a mesh of devices, by name, and the meshes that programs run on.

`DATA` counts replicas: each has all weights, a store and programs of its own, and nothing passes between them, so a
program runs on the mesh of one replica, which does not have this axis. Along `TENSOR` lie the pieces of each layer and
each state. Experts are sharded over it, too, where they divide evenly: all devices have the same tokens, so each
computes its own experts, and the sum of a mixer's parts includes them.

Along `CONTEXT`, which only a mesh with several such members has, lie the pages: each member holds, and attends to,
those of its own positions. In prefill, each also has a share of the tokens (`mamba_jax.layout.shares`). Everything else
is the same on all members: weights, states and, in decoding, all other computation. Sums over `TENSOR` may be added in
another order by each member, so what is chosen by numbers is chosen by the first one.
"""

import functools
import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from kernels_pallas.fixed_order import is_fixed
from mamba_jax.config import ModelConfigError

Values = TypeVar("Values")
DATA = "data"
TENSOR = "tensor"
CONTEXT = "context"
LEAST_TOKENS = 64
"""The fewest tokens for each device of a step that is divided by tokens: between mixers over `TENSOR`, and of several
members in whole layers over `CONTEXT`. With fewer, exchanges take longer than what all tokens cost."""


def make_mesh(shards: int, devices: Sequence[Any] | None = None, *, members: int = 1) -> Mesh:
    """Returns the mesh of one replica: the first `members * shards` devices (of all processes), or of those given.

    `members`: over which pages are divided by position.

    Raises:
        ModelConfigError: there are not as many.
    """
    found = list(jax.devices() if devices is None else devices)
    if len(found) < members * shards:
        context = f"context_parallel_size {members} with " if members > 1 else ""
        raise ModelConfigError(
            f"{context}tensor_parallel_size {shards}: JAX sees {len(found)} {found[0].platform} device(s)"
        )
    if members == 1:
        return Mesh(np.array(found[:shards]), (TENSOR,), axis_types=(AxisType.Auto,))
    whole = np.array(found[: members * shards]).reshape(members, shards)
    return Mesh(whole, (CONTEXT, TENSOR), axis_types=(AxisType.Auto,) * 2)


def replica_meshes(replicas: int, shards: int, *, members: int = 1) -> list[Mesh]:
    """Returns a mesh for each replica, of `members * shards` devices that are its own.

    Raises:
        ModelConfigError: there are not as many.
    """
    found, wanted = jax.devices(), replicas * members * shards
    if len(found) < wanted:
        context = f"context_parallel_size {members} and " if members > 1 else ""
        raise ModelConfigError(
            f"data_parallel_size {replicas} with {context}tensor_parallel_size {shards} takes {wanted} devices: JAX "
            f"sees {len(found)} {found[0].platform} device(s)"
        )
    whole = Mesh(np.array(found[:wanted]).reshape(replicas, members * shards), (DATA, TENSOR))
    return [make_mesh(shards, list(row), members=members) for row in whole.devices]


def members_of(mesh: Any) -> int:
    """Returns the number of members of a mesh that pages are divided over by position; 1: they are not divided."""
    return int(mesh.shape.get(CONTEXT, 1))


def has_slow_links(mesh: Mesh | None) -> bool:
    """Returns whether some members lie on other hosts than others; of TPUs, on other slices, whose hosts have the links
    of one host."""
    if mesh is None or members_of(mesh) == 1:
        return False
    place = "slice_index" if mesh.devices.flat[0].platform == "tpu" else "process_index"
    return any(len({getattr(each, place, 0) for each in members}) > 1 for members in mesh.devices.T)


def as_first_member(values: Values) -> Values:
    """Returns arrays that are whole on every device, as the first member has them. One member: nothing changes."""
    mesh = axis_mesh()
    if mesh is None or members_of(mesh) == 1:
        return values

    def on_each_device(values: Values) -> Values:
        return jax.tree.map(lambda each: lax.all_gather(each, CONTEXT)[0], values)

    return jax.shard_map(
        on_each_device, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False
    )(values)


def use_mesh(mesh: Mesh | None) -> AbstractContextManager[Any]:
    """While a program is traced under it, the model's mixers divide their work over the mesh. None: nothing changes."""
    return nullcontext() if mesh is None else jax.set_mesh(mesh)


def settled(values: Values) -> Values:
    """Returns the results of a program that is one of many, and of no step.

    On several devices of a CPU, waits for them: these devices wait for each other without end if 32 programs that
    exchange are in flight.
    """
    devices = {device for leaf in jax.tree.leaves(values) for device in leaf.devices()}
    on_cpu = len(devices) > 1 and next(iter(devices)).platform == "cpu"
    return jax.block_until_ready(values) if on_cpu else values


def axis_mesh() -> Any:
    """Returns the mesh of the program being traced, if that is one to divide layers over; otherwise None."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh if tuple(mesh.axis_names) in ((TENSOR,), (CONTEXT, TENSOR)) and mesh.size > 1 else None


def shares_of(tokens: int, devices: int) -> int:
    """Returns into how many shares a number of tokens is divided: one for each device, or 1 where there are too few."""
    return devices if tokens % devices == 0 and tokens >= LEAST_TOKENS * devices else 1


def axis_index() -> Int[Array, ""]:
    """Which piece this device has; inside of `jax.shard_map` over the mesh only."""
    return jnp.asarray(lax.axis_index(TENSOR))


def sum_over_devices(x: Float[Array, "n ..."], *, scatter: bool = False) -> Float[Array, "own ..."]:
    """Returns the sum of the arrays of all devices along `TENSOR`; with `scatter`, this device's share of its rows.

    Inside of `jax.shard_map` over the mesh only. Schedule-invariant programs add in the order of the devices: the order
    of a runtime's sum depends on the array's size. They add in float32 and round once.
    """
    if not is_fixed():
        return lax.psum_scatter(x, TENSOR, scatter_dimension=0, tiled=True) if scatter else lax.psum(x, TENSOR)
    if scatter:
        parts = jnp.split(lax.all_to_all(x, TENSOR, 0, 0, tiled=True), lax.axis_size(TENSOR))
    else:
        parts = lax.all_gather(x, TENSOR)
    return functools.reduce(operator.add, (part.astype(jnp.float32) for part in parts)).astype(x.dtype)


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def split_last(x: Array) -> Array:
    """Constrains the last dimension of x to be divided over the devices, if it divides evenly."""
    mesh = axis_mesh()
    if mesh is None or x.shape[-1] % mesh.shape[TENSOR]:
        return x
    return lax.with_sharding_constraint(x, PartitionSpec(*[None] * (x.ndim - 1), TENSOR))


def keep_whole(x: Array) -> Array:
    """Constrains x to be whole on every device. Does nothing outside a mesh."""
    return x if axis_mesh() is None else lax.with_sharding_constraint(x, PartitionSpec())
