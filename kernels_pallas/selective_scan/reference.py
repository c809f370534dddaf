"""The selective scan's definition: one token after the other, in float64 numpy. Each form returns y in float64."""

import functools

import numpy as np

from kernels_pallas import token_loop
from kernels_pallas.token_loop import wide


def _step(state, x, b, c, dt, *, a):
    """One token of one row: state and a [state, inner], x and dt [inner], b and c [state]. Returns the next state."""
    return np.exp(dt * a) * state + dt * x * b[:, None]


def _read(state, x, b, c, dt, *, d):
    return (state * c[:, None]).sum(0) + d * x


def _loop(form, entry, *places, a, d):
    functions = functools.partial(_step, a=wide(a)), functools.partial(_read, d=wide(d))
    return form(*functions, entry, (np.asarray(entry.dt) != 0).any(-1), np.zeros(entry.x.shape), *places)


selective_scan = functools.partial(_loop, token_loop.scan)
"""Implements `api.selective_scan`; the next one `api.selective_update`. Both return y, and the store in its dtype."""
selective_update = functools.partial(_loop, token_loop.update)


def selective_scan_sequence(entry, *, a, d, initial_state=None):
    """Implements `api.selective_scan_sequence`. Returns y and the final state."""
    start = np.zeros((len(entry.x), *a.shape)) if initial_state is None else wide(initial_state)
    return _loop(token_loop.sequence, entry, start, a=a, d=d)


def selective_replay(entry, store, tail, places, *, a, d):
    """Implements `api.selective_replay`. Returns y, store and the tail's arrays in their dtypes."""

    def token(state, kept, row, t):
        new = [np.asarray(v)[row, max(t, 0)] for v in entry]
        if t >= 0:
            for ring, value in zip(kept, (new[0], new[1], new[3]), strict=True):
                ring[:] = value
        x, b, dt = map(wide, kept)
        state = _step(state, x, b, None, dt, a=wide(a))
        return state, _read(state, x, b, wide(new[2]), dt, d=wide(d))

    return token_loop.replay(token, np.zeros(entry.x.shape), store, tail, places)
