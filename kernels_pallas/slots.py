"""Read and write slots (and pages) of a store in place. Slot 0 is null: its contents are undefined and may include NaN.

An operation on slots guarantees:

* slot 0 reads as zeros, and writes to it are dropped;
* a row's read comes before all of its own writes, so a row may write the slot that it reads;
* several rows may read one slot.

Because rows run concurrently and in any order, callers must ensure:

* no row writes a slot that another row reads;
* no two writes of a call name the same slot.

On CPU, XLA computes with 16-bit floats by converting to float32 and back, and does so for whole operands: updating one
slot of a bfloat16 store would convert all of it. There, slots are read and written as 16-bit integers, which are never
converted. Functions here have the derivatives of copies of floats.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int, Shaped

from kernels_pallas import native
from kernels_pallas.dispatch import differentiable


def load(v: Shaped[Array, "n *shape"], index: Int[Array, ""]) -> Shaped[Array, "*shape"]:
    """v[index], for use inside a loop."""
    return _narrow_as_bits(lambda v, index: lax.dynamic_index_in_dim(v, index, keepdims=False), v, index)


def put(
    v: Shaped[Array, "n *shape"], value: Shaped[Array, "*shape"], index: Int[Array, ""]
) -> Shaped[Array, "n *shape"]:
    """v with `value` at `index`, in v's dtype, for use inside a loop."""

    def update(v, value, index):
        return lax.dynamic_update_index_in_dim(v, value, index, 0)

    return _narrow_as_bits(update, v, value.astype(v.dtype), index)


def write_slot_if(
    store: Shaped[Array, "slots *shape"], value: Shaped[Array, "*shape"], index: Int[Array, ""]
) -> Shaped[Array, "slots *shape"]:
    """Returns the store with `value` at `index`, for use inside a loop; leaves the contents of slot 0 undefined."""

    def branch(store, value, index):
        return lax.cond(index > 0, lambda store: put(store, value, index), lambda store: store, store)

    # On other platforms a conditional costs more than a write to the null slot; on GPU it copies the whole store.
    return lax.platform_dependent(store, value, index, cpu=branch, default=put)


def take(v: Shaped[Array, "n *shape"], index: Int[Array, "..."]) -> Shaped[Array, "..."]:
    """v[index], any number of them; index 0 is not masked."""
    return _narrow_as_bits(lambda v, index: v[index], v, index)


def read_slots(
    store: Shaped[Array, "slots *shape"], index: Int[Array, " n"], *, divided: bool = False
) -> Shaped[Array, "n *shape"]:
    """Returns the slots at `index`; zeros where it is 0.

    `divided`: the compiler may have divided slots over devices, as it does outside of `shard_map`. The compiler cannot
    partition native operations, and would gather the whole store on every device for one.
    """

    def read(store, index):
        there = (index > 0).reshape(-1, *[1] * (store.ndim - 1))
        return jnp.where(there, take(store, index), jnp.zeros((), store.dtype))

    def zeros(store, index):
        return jnp.zeros((*index.shape, *store.shape[1:]), store.dtype)

    def read_apart(store, index):
        # XLA:CPU tends to repeat a read inside each of its uses. If a use comes after a write to the store, XLA copies
        # the whole store first. It cannot repeat the result of a conditional, nor move the store's change of type out
        # of the loop, which would be another copy.
        return lax.cond((index > 0).any(), read, zeros, store, index)

    def read_natively(store, index):
        found = jax.ShapeDtypeStruct((*index.shape, *store.shape[1:]), store.dtype)
        read = jax.ffi.ffi_call(native.target("read_slots"), found, vmap_method="sequential")
        return read(store, index.astype(jnp.int32))

    on_cpu = read_apart if divided or native.WHY_MISSING else read_natively
    by_platform = functools.partial(lax.platform_dependent, cpu=on_cpu, default=read)
    return differentiable(by_platform, read)(store, index)


def write_slots(
    store: Shaped[Array, "..."], values: Shaped[Array, "n *shape"], index: Int[Array, " n"], *, divided: bool = False
) -> Shaped[Array, "..."]:
    """Returns the store [slots, *shape] with `values` at `index`. Drops those for index 0; other indices are distinct.

    `divided` is as for `read_slots`.

    A store may have its slots on several axes [.., *shape]; `index` counts them all in order. (Callers must not reshape
    the store for this: XLA would not update it in place if a native operation receives it in another shape.)
    """

    def at_once(store, values, index):
        flat = store.reshape(-1, *values.shape[1:])
        return flat.at[jnp.where(index > 0, index, flat.shape[0])].set(values, mode="drop").reshape(store.shape)

    def natively(store, values, index):
        updated = jax.ShapeDtypeStruct(store.shape, store.dtype)
        write = jax.ffi.ffi_call(native.target("write_slots"), updated, input_output_aliases={0: 0})
        return write(store, values, index.astype(jnp.int32))

    def by_slices(store, values, index):
        return write_one_by_one(store.reshape(-1, *values.shape[1:]), values, index).reshape(store.shape)

    on_cpu = by_slices if divided or native.WHY_MISSING else natively
    by_platform = functools.partial(lax.platform_dependent, cpu=on_cpu, default=at_once)
    return differentiable(by_platform, at_once)(store, values.astype(store.dtype), index)


def _narrow_as_bits(run, v, *others):
    """run(v, *others); on CPU with 16-bit floats as integers. Elsewhere that could make the compiler copy all of v."""

    def as_bits(*arrays):
        return lax.bitcast_convert_type(run(*map(_as_bits, arrays)), v.dtype)

    if _as_bits(v) is v:
        return run(v, *others)
    by_platform = functools.partial(lax.platform_dependent, cpu=as_bits, default=run)
    return differentiable(by_platform, run)(v, *others)


def write_one_by_one(
    store: Shaped[Array, "slots *shape"], values: Shaped[Array, "n *shape"], index: Int[Array, " n"]
) -> Shaped[Array, "slots *shape"]:
    """Like `write_slots`, but with slices one after the other on all platforms: a scatter may need another layout."""
    return lax.fori_loop(0, len(index), lambda i, store: write_slot_if(store, load(values, i), index[i]), store)


def _as_bits(v):
    narrow = jnp.issubdtype(v.dtype, jnp.floating) and v.dtype.itemsize == 2
    return lax.bitcast_convert_type(v, jnp.uint16) if narrow else v
