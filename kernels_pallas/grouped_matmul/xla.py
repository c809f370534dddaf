"""The grouped product in plain JAX."""

import jax.numpy as jnp
from jax import lax

F32 = jnp.float32


def grouped_matmul(x, w, group_sizes):
    """See `api.grouped_matmul`."""
    out = lax.ragged_dot(x, w.swapaxes(1, 2), group_sizes.astype(jnp.int32), preferred_element_type=F32)
    there = jnp.arange(x.shape[0]) < group_sizes.sum()
    return jnp.where(there[:, None], out, 0).astype(x.dtype)
