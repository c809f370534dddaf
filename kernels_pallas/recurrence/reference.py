"""The recurrence's definition: one token after the other, in float64 numpy. Each form returns y in float64."""

import functools

import numpy as np

from kernels_pallas import token_loop
from kernels_pallas.token_loop import wide


def _step(state, query, key, value, log_decay, strength, *, erase):
    """One token of one row: state [heads, head_dim, state], query and key [groups, state], value [heads, head_dim],
    log_decay [heads] or [heads, state], strength [heads]. Returns the next state.
    """
    key = _by_head(key, len(value))
    state = np.exp(log_decay).reshape(len(value), 1, -1) * state
    stored = (state * key).sum(-1) if erase else 0
    return state + (strength[:, None] * (value - stored))[:, :, None] * key


def _read(state, query, key, value, log_decay, strength, *, skip):
    return (state * _by_head(query, len(value))).sum(-1) + (0 if skip is None else wide(skip)[:, None] * value)


def _by_head(vectors, heads):
    """[groups, state] as [heads, 1, state]."""
    return np.repeat(vectors, heads // len(vectors), axis=0)[:, None, :]


def _loop(form, entry, *places, erase, skip=None):
    functions = functools.partial(_step, erase=erase), functools.partial(_read, skip=skip)
    real = (np.asarray(entry.strength) != 0).any(-1)
    return form(*functions, entry, real, np.zeros(entry.value.shape), *places)


recurrence_scan = functools.partial(_loop, token_loop.scan)
"""Implements `api.recurrence_scan`; the next one `api.recurrence_update`. Both return y, and the store in its dtype."""
recurrence_update = functools.partial(_loop, token_loop.update)


def recurrence_sequence(entry, *, initial_state=None, **how):
    """Implements `api.recurrence_sequence`. Returns y and the final state."""
    start = np.zeros((*entry.value[:, 0].shape, entry.key.shape[-1])) if initial_state is None else wide(initial_state)
    return _loop(token_loop.sequence, entry, start, **how)


def recurrence_replay(entry, store, tail, places, *, erase, skip=None):
    """Implements `api.recurrence_replay`. Returns y, store and the tail's arrays in their dtypes."""
    (_, _, heads, head_dim), groups = entry.value.shape, entry.key.shape[2]

    def token(state, kept, row, t):
        value, key, log_decay, strength = kept
        new = [np.asarray(v)[row, max(t, 0)] for v in entry]
        if t >= 0:
            key[:], value[:], log_decay[:] = (v.reshape(-1) for v in new[1:4])
            if not erase:
                strength[:] = new[4]
        state = np.exp(wide(log_decay)).reshape(heads, 1, -1) * state
        of_head = _by_head(wide(key).reshape(groups, -1), heads)
        if t >= 0 and erase:
            value[:] = (wide(new[4])[:, None] * (wide(new[2]) - (state * of_head).sum(-1))).reshape(-1)
        scale = 1 if erase else wide(strength)[:, None, None]
        state = state + scale * wide(value).reshape(heads, head_dim, 1) * of_head
        return state, _read(state, *map(wide, new), skip=skip)

    return token_loop.replay(token, np.zeros(entry.value.shape), store, tail, places)
