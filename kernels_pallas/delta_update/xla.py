"""The delta update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import row_loop
from kernels_pallas.row_loop import head_axes

F32 = jnp.float32


def delta_update(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """See `api.delta_update`. The target platform of compilation selects the form."""

    def by(form):
        return lambda *arguments: form(*arguments[:-2], read_slot=arguments[-2], write_slot=arguments[-1])

    arguments = q, k, v, log_decay, beta, store, read_slot, write_slot
    return lax.platform_dependent(*arguments, cpu=by(row_blocks), default=by(all_rows))


def all_rows(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """Gathers all rows' states, runs the rows in parallel, and scatters the states."""
    return _update(row_loop.all_rows, q, k, v, log_decay, beta, store, read_slot, write_slot)


def row_blocks(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """Loops over a few rows at a time."""
    return _update(row_loop.row_blocks, q, k, v, log_decay, beta, store, read_slot, write_slot)


def _update(rows, q, k, v, log_decay, beta, store, read_slot, write_slot):
    dtype, beta = v.dtype, beta.astype(F32)
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as beta.
    real = (beta != 0).any(axis=2)[..., None, None]
    q, k, v = (jnp.where(real, one, 0).astype(F32) for one in (q, k, v))
    log_decay = log_decay.reshape(*v.shape[:3], -1)
    decay = jnp.exp(jnp.where(real, log_decay, 0).astype(F32))
    y, store = rows(_step, _read, (k, v, decay, beta), (q,), store, read_slot, write_slot)
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


def _read(state, q):
    """y [heads, head_dim] of one row."""
    split, shared = head_axes(state.shape[0], q.shape[0])
    grouped = state.astype(F32).reshape(*split, *state.shape[1:])
    return (grouped * q.reshape(*shared, 1, -1)).sum(-1).reshape(state.shape[:2])
