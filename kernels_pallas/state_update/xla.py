"""The state update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import row_loop
from kernels_pallas.row_loop import head_axes

F32 = jnp.float32


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.state_update`. The target platform of compilation selects the form."""
    arguments = x, dt, a, b, c, d, store, read_slot, write_slot
    return lax.platform_dependent(*arguments, cpu=_positional(row_blocks), default=_positional(all_rows))


def _positional(form):
    def call(*arguments):
        return form(*arguments[:-2], read_slot=arguments[-2], write_slot=arguments[-1])

    return call


def all_rows(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Gathers all rows' states, runs the rows in parallel, and scatters the states."""
    return _update(row_loop.all_rows, x, dt, a, b, c, d, store, read_slot, write_slot)


def row_blocks(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Loops over a few rows at a time."""
    return _update(row_loop.row_blocks, x, dt, a, b, c, d, store, read_slot, write_slot)


def _update(rows, x, dt, a, b, c, d, store, read_slot, write_slot):
    dtype = x.dtype
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=2)[..., None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    dt, a, d = (v.astype(F32) for v in (dt, a, d))
    inputs = jnp.exp(dt * a), dt[..., None] * x, b
    y, store = rows(_step, _read, inputs, (c,), store, read_slot, write_slot)
    return (y + d[:, None] * x).astype(dtype), store


def _step(state, decay, fed, b):
    """Returns the next state of one row, in the store's precision: the same as one step in each of several calls.

    state [heads, head_dim, state], decay [heads], fed [heads, head_dim], b [groups, state].
    """
    split, shared = head_axes(fed.shape[0], b.shape[0])
    old = state.astype(F32).reshape(*split, fed.shape[1], -1)
    new = old * decay.reshape(*split, 1, 1) + fed.reshape(*split, -1, 1) * b.reshape(*shared, 1, -1)
    return new.reshape(state.shape).astype(state.dtype)


def _read(state, c):
    """y [heads, head_dim] of one row."""
    split, shared = head_axes(state.shape[0], c.shape[0])
    grouped = state.astype(F32).reshape(*split, *state.shape[1:])
    return (grouped * c.reshape(*shared, 1, -1)).sum(-1).reshape(state.shape[:2])
