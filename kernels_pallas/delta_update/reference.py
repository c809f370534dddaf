"""The delta update's definition: one row and one step after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.delta_scan.reference import token, wide


def delta_update(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """Implements `api.delta_update` on numpy arrays. Returns y in float64 and the store in its own dtype."""
    dtype = np.asarray(store).dtype
    *inputs, before = wide(q, k, v, log_decay, beta, store)
    after, y = np.array(store), np.zeros_like(inputs[2])
    for row in range(y.shape[0]):
        state = before[read_slot[row]] if read_slot[row] else np.zeros(before.shape[1:])
        for t in range(y.shape[1]):
            if beta[row, t].any():
                state, _ = token(state, *(one[row, t] for one in inputs))
                state = state.astype(dtype).astype(np.float64)
                query = np.repeat(inputs[0][row, t], state.shape[0] // inputs[0].shape[2], axis=0)
                y[row, t] = (state * query[:, None, :]).sum(-1)
            if write_slot[row][t]:
                after[write_slot[row][t]] = state.astype(dtype)
    return y, after
