"""The scan's definition: one token after the other, in float64 numpy."""

from typing import Any

import numpy as np


def _token(state, x, dt, a, b, c, d):
    """One step for one row: state [heads, head_dim, state], x [heads, head_dim], b and c [groups, state]."""
    repeats = x.shape[0] // b.shape[0]
    b, c = np.repeat(b, repeats, axis=0), np.repeat(c, repeats, axis=0)
    state = np.exp(dt * a)[:, None, None] * state + (dt[:, None] * x)[:, :, None] * b[:, None, :]
    return state, (state * c[:, None, :]).sum(-1) + d[:, None] * x


def _wide(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(v).astype(np.float64) for v in arrays]


def ssd_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """Implements `api.ssd_scan` on numpy arrays. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    x, dt, a, b, c, d, before = _wide(x, dt, a, b, c, d, store)
    after, y = np.array(store), np.zeros_like(x)
    state = np.zeros(before.shape[1:])
    for tile in range(x.shape[0]):
        if tile_first[tile]:
            state = before[read_slot[tile]] if read_slot[tile] else np.zeros_like(state)
        for t in range(x.shape[1]):
            if dt[tile, t].any():
                state, y[tile, t] = _token(state, x[tile, t], dt[tile, t], a, b[tile, t], c[tile, t], d)
        if write_slot[tile]:
            after[write_slot[tile]] = state.astype(dtype)
    return y, after


def ssd_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """Implements `api.ssd_scan_sequence`. Returns y and the final state in float64."""
    x, dt, a, b, c, d = _wide(x, dt, a, b, c, d)
    batch, length, heads, head_dim = x.shape
    y, states = np.zeros_like(x), np.zeros((batch, heads, head_dim, b.shape[-1]))
    if initial_state is not None:
        states += np.asarray(initial_state)
    for row in range(batch):
        for t in range(length):
            if dt[row, t].any():
                states[row], y[row, t] = _token(states[row], x[row, t], dt[row, t], a, b[row, t], c[row, t], d)
    return y, states
