"""The delta update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import functools

import jax.numpy as jnp

from kernels_pallas import row_loop
from kernels_pallas.row_loop import head_axes

F32 = jnp.float32


def _update(rows, q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    dtype, beta = v.dtype, beta.astype(F32)
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as beta.
    real = (beta != 0).any(axis=2)[..., None, None]
    q, k, v = (jnp.where(real, one, 0).astype(F32) for one in (q, k, v))
    log_decay = log_decay.reshape(*v.shape[:3], -1)
    decay = jnp.exp(jnp.where(real, log_decay, 0).astype(F32))
    y, store = rows(_step, row_loop.read_heads, (k, v, decay, beta), (q,), store, read_slot, write_slot)
    return y.astype(dtype), store


def _step(state, k, v, decay, beta):
    """Returns the next state of one row, in the store's precision: the same as one step in each of several calls.

    state [heads, head_dim, state], k [groups, state], v [heads, head_dim], decay [heads, 1 or state], beta [heads].
    """
    split, shared = head_axes(v.shape[0], k.shape[0])
    k, v = k.reshape(*shared, 1, -1), v.reshape(*split, -1, 1)
    decay, beta = decay.reshape(*split, 1, -1), beta.reshape(*split, 1, 1)
    old = state.astype(F32).reshape(*split, *state.shape[1:]) * decay
    new = old + beta * (v - (old * k).sum(-1, keepdims=True)) * k
    return new.reshape(state.shape).astype(state.dtype)


all_rows, row_blocks = (functools.partial(_update, rows) for rows in (row_loop.all_rows, row_loop.row_blocks))
delta_update = row_loop.by_platform(cpu=row_blocks, default=all_rows)
"""See `api.delta_update`."""
