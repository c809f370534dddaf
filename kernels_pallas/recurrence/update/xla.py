"""The update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import functools

import jax.numpy as jnp

from kernels_pallas import row_loop
from kernels_pallas.recurrence.entry import Entry
from kernels_pallas.row_loop import head_axes, read_heads

F32 = jnp.float32


def _update(loop, entry, store, rows, *, erase, skip):
    masked = Entry(*(v.astype(F32) for v in entry.masked()))

    def run(state, query, *others):
        state, _ = add_token(state, *others, erase=erase)
        return state, read_heads(state, query)

    y, store = loop(run, numbers_of(masked), store, rows)
    return (y if skip is None else y + skip[:, None] * masked.value).astype(entry.value.dtype), store


def numbers_of(entry):
    """Returns the query, and what `add_token` takes of a token; the entry is float32."""
    return *entry[:3], jnp.exp(entry.decays), entry.strength


def add_token(state, key, value, decay, strength, *, erase, kept=F32):
    """Returns the next state of one row, in the given one's precision, and what the token adds [heads, head_dim].

    state [heads, head_dim, state], key [groups, state], value [heads, head_dim], decay [heads, 1 or state], strength
    [heads]; `kept` is the precision of what is added.
    """
    split, shared = head_axes(value.shape[0], key.shape[0])
    key, decay = key.reshape(*shared, 1, -1), decay.reshape(*split, 1, -1)
    old = state.astype(F32).reshape(*split, *state.shape[1:]) * decay
    error = value.reshape(*split, -1, 1) - ((old * key).sum(-1, keepdims=True) if erase else 0)
    added = (strength.reshape(*split, 1, 1) * error).astype(kept).astype(F32)
    # Rounded, so that several steps in one call equal one step in each of several calls.
    return (old + added * key).reshape(state.shape).astype(state.dtype), added.reshape(value.shape)


update = row_loop.by_platform(*(functools.partial(_update, loop) for loop in (row_loop.row_blocks, row_loop.all_rows)))
