"""The selective scan's definition: one token after the other, in float64 numpy."""

from typing import Any

import numpy as np


def _token(state, x, dt, a, b, c, d):
    """One step for one row: state and a [state, inner], x, dt and d [inner], b and c [state]."""
    state = np.exp(dt * a) * state + dt * x * b[:, None]
    return state, (state * c[:, None]).sum(0) + d * x


def _wide(*arrays: Any) -> list[np.ndarray]:
    return [np.asarray(v).astype(np.float64) for v in arrays]


def selective_scan(x, dt, a, b, c, d, store, tiles):
    """Implements `api.selective_scan` on numpy arrays. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    x, dt, a, b, c, d, before = _wide(x, dt, a, b, c, d, store)
    after, y = np.array(store), np.zeros_like(x)
    state = np.zeros(before.shape[1:])
    for tile in range(x.shape[0]):
        if tiles.first[tile]:
            slot = tiles.read_slot[tile]
            state = before[slot] if slot else np.zeros_like(state)
        for t in range(x.shape[1]):
            if dt[tile, t].any():
                state, y[tile, t] = _token(state, x[tile, t], dt[tile, t], a, b[tile, t], c[tile, t], d)
        if tiles.write_slot[tile]:
            after[tiles.write_slot[tile]] = state.astype(dtype)
    return y, after


def selective_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """Implements `api.selective_scan_sequence`. Returns y and the final state in float64."""
    x, dt, a, b, c, d = _wide(x, dt, a, b, c, d)
    y, states = np.zeros_like(x), np.zeros((x.shape[0], *a.shape))
    if initial_state is not None:
        states += np.asarray(initial_state)
    for row in range(x.shape[0]):
        for t in range(x.shape[1]):
            if dt[row, t].any():
                states[row], y[row, t] = _token(states[row], x[row, t], dt[row, t], a, b[row, t], c[row, t], d)
    return y, states


def selective_update(x, dt, a, b, c, d, store, rows):
    """Implements `api.selective_update`. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    x, dt, a, b, c, d, before = _wide(x, dt, a, b, c, d, store)
    after, y = np.array(store), np.zeros_like(x)
    for row in range(x.shape[0]):
        state = before[rows.read_slot[row]] if rows.read_slot[row] else np.zeros(before.shape[1:])
        for t in range(x.shape[1]):
            if dt[row, t].any():
                state, _ = _token(state, x[row, t], dt[row, t], a, b[row, t], c[row, t], d)
                state = state.astype(dtype).astype(np.float64)
                y[row, t] = (state * c[row, t][:, None]).sum(0) + d * x[row, t]
            if rows.write_slot[row][t]:
                after[rows.write_slot[row][t]] = state.astype(dtype)
    return y, after


def selective_replay(x, dt, a, b, c, d, states, tail, places):
    """Implements `api.selective_replay` on numpy arrays. Returns y in float64, states and tail in their dtypes."""
    before, after = np.asarray(states).astype(np.float64), np.array(states)
    tail, y = [np.array(v) for v in tail], np.zeros(x.shape)
    entries = tail[0].shape[1]
    a, d, queries = _wide(a, d, c)
    for row in range(x.shape[0]):
        start, count, anchor = int(places.length[row]), int(places.num_tokens[row]), places.anchor_slot[row]
        state = before[anchor] if anchor else np.zeros(before.shape[1:])
        for n in range(int(places.anchor_length[row]), start + count if count else 0):
            ring, t = [v[places.tail_id[row], n % entries] for v in tail], n - start
            if t >= 0:
                for kept, new in zip(ring, (x, b, dt), strict=True):
                    kept[:] = new[row, t]
            own_x, own_b, own_dt = _wide(*ring)
            query = queries[row, t] if t >= 0 else np.zeros_like(own_b)
            state, out = _token(state, own_x, own_dt, a, own_b, query, d)
            if t >= 0:
                y[row, t] = out
            if n + 1 == (start // places.interval + 1) * places.interval and places.write_slot[row]:
                after[places.write_slot[row]] = state.astype(after.dtype)
    return y, after, tail
