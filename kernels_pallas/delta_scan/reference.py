"""The gated delta rule's definition: one token after the other, in float64 numpy."""

from typing import Any

import numpy as np


def token(state, q, k, v, log_decay, beta):
    """One step for one row: state [heads, head_dim, state], q and k [groups, state], v [heads, head_dim], log_decay
    [heads] or [heads, state].
    """
    repeats = v.shape[0] // k.shape[0]
    q, k = (np.repeat(one, repeats, axis=0)[:, None, :] for one in (q, k))
    state = np.exp(log_decay).reshape(v.shape[0], 1, -1) * state
    remembered = (state * k).sum(-1)
    state = state + (beta[:, None] * (v - remembered))[:, :, None] * k
    return state, (state * q).sum(-1)


def wide(*arrays: Any) -> list[np.ndarray]:
    """Returns the arrays in float64."""
    return [np.asarray(v).astype(np.float64) for v in arrays]


def delta_scan(q, k, v, log_decay, beta, store, *, tile_first, read_slot, write_slot):
    """Implements `api.delta_scan` on numpy arrays. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    *inputs, before = wide(q, k, v, log_decay, beta, store)
    after, y = np.array(store), np.zeros_like(inputs[2])
    state = np.zeros(before.shape[1:])
    for tile in range(y.shape[0]):
        if tile_first[tile]:
            state = before[read_slot[tile]] if read_slot[tile] else np.zeros_like(state)
        for t in range(y.shape[1]):
            if beta[tile, t].any():
                state, y[tile, t] = token(state, *(one[tile, t] for one in inputs))
        state = state.astype(dtype).astype(np.float64)
        if write_slot[tile]:
            after[write_slot[tile]] = state.astype(dtype)
    return y, after


def delta_scan_sequence(q, k, v, log_decay, beta, *, initial_state=None):
    """Implements `api.delta_scan_sequence`. Returns y and the final state in float64."""
    inputs = wide(q, k, v, log_decay, beta)
    batch, length, heads, head_dim = inputs[2].shape
    y, states = np.zeros_like(inputs[2]), np.zeros((batch, heads, head_dim, inputs[1].shape[-1]))
    if initial_state is not None:
        states += np.asarray(initial_state)
    for row in range(batch):
        for t in range(length):
            if beta[row, t].any():
                states[row], y[row, t] = token(states[row], *(one[row, t] for one in inputs))
    return y, states
