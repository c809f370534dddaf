"""Reading and writing slots (and pages) of a store in place. Index 0 is nowhere: it may hold anything, NaN included."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int


def read_slots(store: Float[Array, "slots *shape"], index: Int[Array, " n"]) -> Float[Array, "n *shape"]:
    """The slots at `index`; zeros where it is 0."""
    if index.shape[0] == 1:
        # One read becomes a slice, which XLA:CPU repeats inside every use, and then copies the store before writing it.
        return read_slots(store, jnp.pad(index, (0, 1)))[:1]
    there = (index > 0).reshape(-1, *[1] * (store.ndim - 1))
    return jnp.where(there, store[index], jnp.zeros((), store.dtype))


def write_slots(
    store: Float[Array, "slots *shape"], values: Float[Array, "n *shape"], index: Int[Array, " n"]
) -> Float[Array, "slots *shape"]:
    """The store with `values` at `index`; those for index 0 are dropped. Other indices are distinct."""
    if index.shape[0] == 1:
        index, values = jnp.pad(index, (0, 1)), jnp.concatenate([values, values])  # see `read_slots`
    outside = jnp.where(index > 0, index, store.shape[0])
    return store.at[outside].set(values.astype(store.dtype), mode="drop")


def write_slot_if(
    store: Float[Array, "slots *shape"], value: Float[Array, "*shape"], index: Int[Array, ""]
) -> Float[Array, "slots *shape"]:
    """The store with `value` at `index` unless that is 0. For use inside a loop, where it is faster than a scatter."""

    def write(store):
        return lax.dynamic_update_index_in_dim(store, value.astype(store.dtype), index, 0)

    return lax.cond(index > 0, write, lambda store: store, store)
