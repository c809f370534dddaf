"""Stores in which a slot or page that a step reads before it is written shows in the results."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mamba_jax.sharding import sharded_store
from mamba_jax.store import Store, init_store
from tests.support.stored_jit import StoredJit


def spoiled_store(*args: Any, **sizes: Any) -> Store:
    """A store as `init_store` makes it, with NaN in place of zeros, the null slot and page included."""
    return _maker(*args, **sizes)()


def spoiled_sharded_store(*args: Any, **sizes: Any) -> Store:
    """The same over the devices of a mesh, as `sharded_store` makes it."""
    store = sharded_store(*args, **sizes)
    return jax.tree.map(lambda leaf: jax.device_put(spoiled(leaf), leaf.sharding), store)


@functools.cache
def _maker(*args: Any, **sizes: Any) -> Callable[[], Store]:
    # One program: outside of `jit` there would be one or two for each shape.
    return StoredJit(lambda: jax.tree.map(spoiled, init_store(*args, **sizes)))


def spoiled(leaf: jax.Array) -> jax.Array:
    return jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
