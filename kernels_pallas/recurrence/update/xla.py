"""The update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import functools

import jax.numpy as jnp

from kernels_pallas import row_loop
from kernels_pallas.recurrence.entry import Entry
from kernels_pallas.row_loop import head_axes

F32 = jnp.float32


def _update(all_or_few, entry, store, rows, *, erase, skip):
    masked = Entry(*(v.astype(F32) for v in entry.masked()))
    query, key, value, _, strength = masked
    decay = jnp.exp(masked.decays)
    step = functools.partial(_step, erase=erase)
    y, store = all_or_few(step, row_loop.read_heads, (key, value, decay, strength), (query,), store, rows)
    return (y if skip is None else y + skip[:, None] * value).astype(entry.value.dtype), store


def _step(state, key, value, decay, strength, *, erase):
    """Returns the next state of one row, in the store's precision: the same as one step in each of several calls.

    state [heads, head_dim, state], key [groups, state], value [heads, head_dim], decay [heads, 1 or state], strength
    [heads].
    """
    split, shared = head_axes(value.shape[0], key.shape[0])
    key, value = key.reshape(*shared, 1, -1), value.reshape(*split, -1, 1)
    decay, strength = decay.reshape(*split, 1, -1), strength.reshape(*split, 1, 1)
    old = state.astype(F32).reshape(*split, *state.shape[1:]) * decay
    new = old + strength * (value - (old * key).sum(-1, keepdims=True) if erase else value) * key
    return new.reshape(state.shape).astype(state.dtype)


update = row_loop.by_platform(*(functools.partial(_update, loop) for loop in (row_loop.row_blocks, row_loop.all_rows)))
