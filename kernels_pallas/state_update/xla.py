"""The state update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import functools

import jax.numpy as jnp

from kernels_pallas import row_loop
from kernels_pallas.row_loop import head_axes

F32 = jnp.float32


def _update(rows, x, dt, a, b, c, d, store, *, read_slot, write_slot):
    dtype = x.dtype
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=2)[..., None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    dt, a, d = (v.astype(F32) for v in (dt, a, d))
    inputs = jnp.exp(dt * a), dt[..., None] * x, b
    y, store = rows(_step, row_loop.read_heads, inputs, (c,), store, read_slot, write_slot)
    return (y + d[:, None] * x).astype(dtype), store


def _step(state, decay, fed, b):
    """Returns the next state of one row, in the store's precision: the same as one step in each of several calls.

    state [heads, head_dim, state], decay [heads], fed [heads, head_dim], b [groups, state].
    """
    split, shared = head_axes(fed.shape[0], b.shape[0])
    old = state.astype(F32).reshape(*split, fed.shape[1], -1)
    new = old * decay.reshape(*split, 1, 1) + fed.reshape(*split, -1, 1) * b.reshape(*shared, 1, -1)
    return new.reshape(state.shape).astype(state.dtype)


all_rows, row_blocks = (functools.partial(_update, rows) for rows in (row_loop.all_rows, row_loop.row_blocks))
state_update = row_loop.by_platform(cpu=row_blocks, default=all_rows)
"""See `api.state_update`."""
