"""The convolution's definition: each row as one list of inputs, window first, in float64 numpy."""

import numpy as np


def _wide(v):
    return np.asarray(v).astype(np.float64)


def _row(window, x, weight, bias, activation):
    """Outputs [length, channels] of one row and all its inputs [width-1 + length, channels], window first."""
    inputs, width = np.concatenate([window, x]), weight.shape[1]
    y = np.zeros_like(x)
    for t in range(len(x)):
        total = (inputs[t : t + width] * weight.T).sum(0) + (0 if bias is None else bias)
        y[t] = total / (1 + np.exp(-total)) if activation == "silu" else total
    return y, inputs


def _window(store, slot):
    return _wide(store[slot]) if slot else np.zeros(store.shape[1:])


def causal_conv1d_prefill(
    x, weight, bias, store, *, token_row, row_start, read_slot, tile_row, tile_end, write_slot, activation="silu"
):
    """Implements `api.causal_conv1d_prefill`. Returns y in float64 (0 for tokens outside of all rows) and the store."""
    store, x, weight, bias = np.array(store), _wide(x), _wide(weight), None if bias is None else _wide(bias)
    before, y, keep = store.copy(), np.zeros_like(x), weight.shape[1] - 1
    for row, start in enumerate(row_start):
        length = max([int(end) for r, end in zip(tile_row, tile_end, strict=True) if r == row], default=0)
        window = _window(before, read_slot[row])
        y[start : start + length], inputs = _row(window, x[start : start + length], weight, bias, activation)
        for tile in range(len(tile_row)):
            if tile_row[tile] == row and write_slot[tile]:
                store[write_slot[tile]] = inputs[tile_end[tile] : tile_end[tile] + keep].astype(store.dtype)
    return y, store


def causal_conv1d_update(x, weight, bias, store, *, read_slot, write_slot, activation="silu"):
    """Implements `api.causal_conv1d_update`. Returns y in float64 and the store in its own dtype."""
    store, x, weight, bias = np.array(store), _wide(x), _wide(weight), None if bias is None else _wide(bias)
    before, y, keep = store.copy(), np.zeros_like(x), weight.shape[1] - 1
    for row in range(x.shape[0]):
        y[row], inputs = _row(_window(before, read_slot[row]), x[row], weight, bias, activation)
        for t, slot in enumerate(write_slot[row]):
            if slot:
                store[slot] = inputs[t + 1 : t + 1 + keep].astype(store.dtype)
    return y, store


def causal_conv1d_replay(
    x, weight, bias, store, ring, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot, interval,
    activation="silu",
):  # fmt: skip
    """Implements `replay.causal_conv1d_replay`. Returns y in float64 (0 for padding), store and ring."""
    store, ring, x, weight = np.array(store), np.array(ring), _wide(x), _wide(weight)
    before, bias, y = store.copy(), None if bias is None else _wide(bias), np.zeros_like(x)
    keep, entries = weight.shape[1] - 1, ring.shape[1]
    for row, (anchor, start, count) in enumerate(zip(anchor_length, length, num_tokens, strict=True)):
        if not count:
            continue
        held, tail = _window(before, anchor_slot[row]), ring[tail_id[row]]
        last = [tail[n % entries] if n >= anchor else held[keep + n - anchor] for n in range(start - keep, start)]
        y[row, :count], inputs = _row(_wide(np.stack(last)), x[row, :count], weight, bias, activation)
        for t in range(count):
            tail[(start + t) % entries] = x[row, t].astype(ring.dtype)
        ahead = (start // interval + 1) * interval - start
        if ahead <= count and write_slot[row]:
            store[write_slot[row]] = inputs[ahead : ahead + keep].astype(store.dtype)
    return y, store, ring


def causal_conv1d_sequence(x, weight, bias, *, activation="silu"):
    """Implements `api.causal_conv1d_sequence`, in float64."""
    x, weight, bias = _wide(x), _wide(weight), None if bias is None else _wide(bias)
    start = np.zeros((weight.shape[1] - 1, x.shape[2]))
    return np.stack([_row(start, row, weight, bias, activation)[0] for row in x]) if len(x) else x
