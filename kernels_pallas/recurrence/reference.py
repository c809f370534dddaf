"""The recurrence's definition: one token after the other, in float64 numpy. Each form returns y in float64."""

from typing import Any

import numpy as np

from kernels_pallas.recurrence.entry import Entry


def token(state, query, key, value, log_decay, strength, *, erase, skip=None):
    """One token of one row: state [heads, head_dim, state], query and key [groups, state], value [heads, head_dim],
    log_decay [heads] or [heads, state], strength [heads]. Returns the next state and y.
    """
    query, key = (by_head(v, len(value)) for v in (query, key))
    state = np.exp(log_decay).reshape(len(value), 1, -1) * state
    stored = (state * key).sum(-1) if erase else 0
    state = state + (strength[:, None] * (value - stored))[:, :, None] * key
    return state, (state * query).sum(-1) + (0 if skip is None else wide(skip)[:, None] * value)


def wide(array: Any) -> np.ndarray:
    """Returns the array in float64."""
    return np.asarray(array).astype(np.float64)


def _wide_entry(entry: Any) -> Any:
    return Entry(*map(wide, entry))  # type: ignore[arg-type]


def by_head(vectors, heads):
    """[groups, state] as [heads, 1, state]."""
    return np.repeat(vectors, heads // len(vectors), axis=0)[:, None, :]


def recurrence_scan(entry, store, tiles, **recurrence):
    """Implements `api.recurrence_scan`. Returns y and the store in its own dtype."""
    entry, before, after = _wide_entry(entry), wide(store), np.array(store)
    y, state = np.zeros_like(entry.value), np.zeros(before.shape[1:])
    for tile in range(len(y)):
        if tiles.first[tile]:
            state = before[tiles.read_slot[tile]] if tiles.read_slot[tile] else np.zeros_like(state)
        for t in range(y.shape[1]):
            if entry.strength[tile, t].any():
                state, y[tile, t] = token(state, *(v[tile, t] for v in entry), **recurrence)
        state = wide(state.astype(after.dtype))
        if tiles.write_slot[tile]:
            after[tiles.write_slot[tile]] = state.astype(after.dtype)
    return y, after


def recurrence_sequence(entry, *, initial_state=None, **recurrence):
    """Implements `api.recurrence_sequence`. Returns y and the final state."""
    entry = _wide_entry(entry)
    y, states = np.zeros_like(entry.value), np.zeros((*entry.value[:, 0].shape, entry.key.shape[-1]))
    if initial_state is not None:
        states += np.asarray(initial_state)
    for row in range(len(y)):
        for t in range(y.shape[1]):
            if entry.strength[row, t].any():
                states[row], y[row, t] = token(states[row], *(v[row, t] for v in entry), **recurrence)
    return y, states


def recurrence_update(entry, store, rows, **recurrence):
    """Implements `api.recurrence_update`. Returns y and the store in its own dtype."""
    entry, before, after = _wide_entry(entry), wide(store), np.array(store)
    y = np.zeros_like(entry.value)
    for row in range(len(y)):
        state = before[rows.read_slot[row]] if rows.read_slot[row] else np.zeros(before.shape[1:])
        for t in range(y.shape[1]):
            if entry.strength[row, t].any():
                state, y[row, t] = token(state, *(v[row, t] for v in entry), **recurrence)
                stored = wide(state.astype(after.dtype))
                # Read from the state as it is stored.
                y[row, t] += ((stored - state) * by_head(entry.query[row, t], len(state))).sum(-1)
                state = stored
            if rows.write_slot[row][t]:
                after[rows.write_slot[row][t]] = state.astype(after.dtype)
    return y, after


def recurrence_replay(entry, store, tail, places, *, erase, skip=None):
    """Implements `api.recurrence_replay`, from the anchor over every token since. Returns y, store and the tail's
    arrays in their dtypes.
    """
    before, after = wide(store), np.array(store)
    kept: list[Any] = [None if v is None else np.array(v) for v in tail]
    y, (heads, head_dim) = np.zeros(entry.value.shape), entry.value.shape[2:]
    entries, groups = kept[0].shape[1], entry.key.shape[2]
    for row in range(len(y)):
        start, count = int(places.length[row]), int(places.num_tokens[row])
        if not count:
            continue
        rings: list[Any] = [None if v is None else v[places.tail_id[row]] for v in kept]
        values, keys, decays, strengths = rings
        state = before[places.anchor_slot[row]] if places.anchor_slot[row] else np.zeros(before.shape[1:])
        boundary = (start // places.interval + 1) * places.interval
        for n in range(int(places.anchor_length[row]), start + count):
            at, t = n % entries, n - start
            if t >= 0:
                query, key, value, log_decay, strength = (np.asarray(v)[row, t] for v in entry)
                keys[at], decays[at], values[at] = key.reshape(-1), log_decay.reshape(-1), value.reshape(-1)
                if not erase:
                    strengths[at] = strength
            state = np.exp(wide(decays[at])).reshape(heads, 1, -1) * state
            key = by_head(wide(keys[at]).reshape(groups, -1), heads)
            if t >= 0 and erase:
                values[at] = (wide(strength)[:, None] * (wide(value) - (state * key).sum(-1))).reshape(-1)
            scale = 1 if erase else wide(strengths[at])[:, None, None]
            state = state + scale * wide(values[at]).reshape(heads, head_dim, 1) * key
            if t >= 0:
                y[row, t] = (state * by_head(wide(query), heads)).sum(-1)
                y[row, t] += 0 if skip is None else wide(skip)[:, None] * wide(value)
            if n + 1 == boundary and places.write_slot[row]:
                after[places.write_slot[row]] = state.astype(after.dtype)
    return y, after, kept
