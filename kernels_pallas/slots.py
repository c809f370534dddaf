"""Reading and writing slots (and pages) of a store in place. Index 0 is nowhere: it may hold anything, NaN included."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def read_slots(store: Float[Array, "slots *shape"], index: Int[Array, " n"]) -> Float[Array, "n *shape"]:
    """The slots at `index`; zeros where it is 0."""
    there = (index > 0).reshape(-1, *[1] * (store.ndim - 1))
    return jnp.where(there, store[index], jnp.zeros((), store.dtype))


def write_slots(
    store: Float[Array, "slots *shape"], values: Float[Array, "n *shape"], index: Int[Array, " n"]
) -> Float[Array, "slots *shape"]:
    """The store with `values` at `index`; those for index 0 are dropped. Other indices are distinct."""
    outside = jnp.where(index > 0, index, store.shape[0])
    return store.at[outside].set(values.astype(store.dtype), mode="drop")
