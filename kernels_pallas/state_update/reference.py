"""The state update's definition: one row and one step after the other, in float64 numpy."""

import numpy as np


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Implements `api.state_update` on numpy arrays. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    x, dt, a, b, c, d, before = (np.asarray(v).astype(np.float64) for v in (x, dt, a, b, c, d, store))
    after, y = np.array(store), np.zeros_like(x)
    repeats = x.shape[2] // b.shape[2]
    for row in range(x.shape[0]):
        state = before[read_slot[row]] if read_slot[row] else np.zeros(before.shape[1:])
        for t in range(x.shape[1]):
            if dt[row, t].any():
                bt, ct = (np.repeat(v[row, t], repeats, axis=0)[:, None, :] for v in (b, c))
                fed = (dt[row, t][:, None] * x[row, t])[:, :, None] * bt
                state = np.exp(dt[row, t] * a)[:, None, None] * state + fed
                state = state.astype(dtype).astype(np.float64)
                y[row, t] = (state * ct).sum(-1) + d[:, None] * x[row, t]
            if write_slot[row][t]:
                after[write_slot[row][t]] = state.astype(dtype)
    return y, after
