"""Stores in which a slot or page that a step reads before it is written shows in the results."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mamba_jax.store import Store, init_store


def spoiled_store(*args: Any, **sizes: Any) -> Store:
    """A store as `init_store` makes it, with NaN in place of zeros, the null slot and page included."""
    return _maker(*args, **sizes)()


@functools.cache
def _maker(*args: Any, **sizes: Any) -> Callable[[], Store]:
    def spoil(leaf: jax.Array) -> jax.Array:
        return jnp.full_like(leaf, jnp.nan) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    # One program: outside of `jit` there would be one or two for each shape.
    return jax.jit(lambda: jax.tree.map(spoil, init_store(*args, **sizes)))
