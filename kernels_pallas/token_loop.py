"""The loops of recurrences' definitions, in float64 numpy: one token after the other, from slots to slots.

A recurrence is two functions of a state and what it gets of a token: `step` returns the next state, `read` an output.
`entry` are arrays of tokens, [tiles, tile_size, ...] or [rows, steps, ...]; `real` tells which are no padding; `y` are
zeros in the outputs' shape. Stores are returned in their own dtype.
"""

from typing import Any

import numpy as np

from kernels_pallas.places import Rows, Tiles


def wide(array: Any) -> np.ndarray:
    """Returns the array in float64."""
    return np.asarray(array).astype(np.float64)


def scan(step, read, entry, real, y, store, tiles, *, by_token=False):
    """Tiles of rows. States are rounded to the store's dtype after each tile, or `by_token` before each output."""
    entry, before, after = [wide(v) for v in entry], wide(store), np.array(store)
    state = np.zeros(before.shape[1:])
    for tile in range(len(y)):
        if tiles.first[tile]:
            state = before[tiles.read_slot[tile]] if tiles.read_slot[tile] else np.zeros_like(state)
        for t in np.flatnonzero(real[tile]):
            token = [v[tile, t] for v in entry]
            state = step(state, *token)
            state = wide(state.astype(after.dtype)) if by_token else state
            y[tile, t] = read(state, *token)
        state = wide(state.astype(after.dtype))
        if tiles.write_slot[tile]:
            after[tiles.write_slot[tile]] = state.astype(after.dtype)
    return y, after


def sequence(step, read, entry, real, y, start):
    """Whole sequences, from the states `start`. Returns the outputs and the final states in float64."""
    store, slots = np.concatenate([np.zeros_like(start[:1]), start]), np.arange(1, len(start) + 1)
    tiles: Any = np.ones(len(start), bool), slots, slots
    y, store = scan(step, read, entry, real, y, store, Tiles(*tiles))
    return y, store[1:]


def update(step, read, entry, real, y, store, rows: Rows):
    """Rows of a few steps, each of which writes a state: tiles of one token."""
    count, steps = y.shape[:2]
    *entry, real, flat = (np.asarray(v).reshape(count * steps, 1, *v.shape[2:]) for v in (*entry, real, y))
    first = np.arange(count * steps) % max(steps, 1) == 0
    tiles: Any = first, np.repeat(rows.read_slot, steps), np.reshape(rows.write_slot, -1)
    flat, store = scan(step, read, entry, real, flat, store, Tiles(*tiles), by_token=True)
    return flat.reshape(y.shape), store


def replay(token, y, store, tail, places):
    """Rows from their anchors over every token since.

    `token(state, kept, row, t)` returns the next state and the output of token t of a row's new ones, and fills `kept`,
    its entries in the tail; with t < 0 it is an older token, whose entries are filled, and the output is dropped.

    Returns:
        The outputs, the store, and the arrays of the tail, in their dtypes.
    """
    before, after = wide(store), np.array(store)
    rings: list[Any] = [None if v is None else np.array(v) for v in tail]
    for row in range(len(y)):
        start, count, slot = int(places.length[row]), int(places.num_tokens[row]), places.anchor_slot[row]
        state = before[slot] if slot else np.zeros(before.shape[1:])
        boundary = (start // places.interval + 1) * places.interval
        for n in range(int(places.anchor_length[row]), start + count if count else 0):
            kept = [None if v is None else v[places.tail_id[row], n % v.shape[1]] for v in rings]
            state, out = token(state, kept, row, n - start)
            if n >= start:
                y[row, n - start] = out
            if n + 1 == boundary and places.write_slot[row]:
                after[places.write_slot[row]] = state.astype(after.dtype)
    return y, after, rings
