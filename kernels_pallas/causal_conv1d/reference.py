"""The convolution's definition: each row as one list of inputs, window first, in float64 numpy."""

import numpy as np

from kernels_pallas.token_loop import wide


def _row(window, x, weight, bias, activation):
    """Outputs [length, channels] of one row and all its inputs [width-1 + length, channels], window first."""
    inputs, width = np.concatenate([window, x]), weight.shape[1]
    y = np.zeros_like(x)
    for t in range(len(x)):
        total = (inputs[t : t + width] * weight.T).sum(0) + (0 if bias is None else bias)
        y[t] = total / (1 + np.exp(-total)) if activation == "silu" else total
    return y, inputs


def _window(store, slot):
    return wide(store[slot]) if slot else np.zeros(store.shape[1:])


def causal_conv1d_prefill(x, weight, bias, store, packed, *, activation="silu"):
    """Implements `api.causal_conv1d_prefill`. Returns y in float64 (0 for tokens outside of all rows) and the store."""
    store, x, weight, bias = np.array(store), wide(x), wide(weight), None if bias is None else wide(bias)
    before, y, keep = store.copy(), np.zeros_like(x), weight.shape[1] - 1
    tiles = list(zip(packed.tile_row, packed.tile_end, packed.tiles.write_slot, strict=True))
    for row, start in enumerate(packed.row_start):
        length = max([int(end) for r, end, _ in tiles if r == row], default=0)
        window = _window(before, packed.read_slot[row])
        y[start : start + length], inputs = _row(window, x[start : start + length], weight, bias, activation)
        for r, end, slot in tiles:
            if r == row and slot:
                store[slot] = inputs[end : end + keep].astype(store.dtype)
    return y, store


def causal_conv1d_update(x, weight, bias, store, rows, *, activation="silu"):
    """Implements `api.causal_conv1d_update`. Returns y in float64 and the store in its own dtype."""
    store, x, weight, bias = np.array(store), wide(x), wide(weight), None if bias is None else wide(bias)
    before, y, keep = store.copy(), np.zeros_like(x), weight.shape[1] - 1
    for row in range(x.shape[0]):
        y[row], inputs = _row(_window(before, rows.read_slot[row]), x[row], weight, bias, activation)
        for t, slot in enumerate(rows.write_slot[row]):
            if slot:
                store[slot] = inputs[t + 1 : t + 1 + keep].astype(store.dtype)
    return y, store


def causal_conv1d_replay(x, weight, bias, store, ring, places, *, activation="silu"):
    """Implements `api.causal_conv1d_replay`. Returns y in float64 (0 for padding), store and ring."""
    store, ring, x, weight = np.array(store), np.array(ring), wide(x), wide(weight)
    before, bias, y = store.copy(), None if bias is None else wide(bias), np.zeros_like(x)
    keep, entries = weight.shape[1] - 1, ring.shape[1]
    lengths = places.anchor_length, places.length, places.num_tokens
    for row, (anchor, start, count) in enumerate(zip(*lengths, strict=True)):
        if not count:
            continue
        held, tail = _window(before, places.anchor_slot[row]), ring[places.tail_id[row]]
        last = [tail[n % entries] if n >= anchor else held[keep + n - anchor] for n in range(start - keep, start)]
        y[row, :count], inputs = _row(wide(np.stack(last)), x[row, :count], weight, bias, activation)
        for t in range(count):
            tail[(start + t) % entries] = x[row, t].astype(ring.dtype)
        ahead = (start // places.interval + 1) * places.interval - start
        if ahead <= count and places.write_slot[row]:
            store[places.write_slot[row]] = inputs[ahead : ahead + keep].astype(store.dtype)
    return y, store, ring


def causal_conv1d_sequence(x, weight, bias, *, activation="silu"):
    """Implements `api.causal_conv1d_sequence`, in float64."""
    x, weight, bias = wide(x), wide(weight), None if bias is None else wide(bias)
    start = np.zeros((weight.shape[1] - 1, x.shape[2]))
    return np.stack([_row(start, row, weight, bias, activation)[0] for row in x]) if len(x) else x
