"""The delta rule's replay, its definition: from the anchor over every token since, in float64 numpy."""

import numpy as np

from kernels_pallas.delta_scan.reference import wide


def delta_replay(
    states, tail, q, k, v, log_decay, beta, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot,
    interval,
):  # fmt: skip
    """Implements `api.delta_replay` on numpy arrays. Returns y in float64, states and tail in their dtypes."""
    before, after = np.asarray(states).astype(np.float64), np.array(states)
    tail, y = [np.array(one) for one in tail], np.zeros(v.shape)
    q, values, beta = wide(q, v, beta)
    entries, (heads, head_dim), (groups, size) = tail[0].shape[1], v.shape[2:], q.shape[2:]

    def by_head(one):
        return np.repeat(one.astype(np.float64).reshape(groups, size), heads // groups, axis=0)[:, None, :]

    for row in range(v.shape[0]):
        start, count = int(length[row]), int(num_tokens[row])
        if not count:
            continue
        u, keys, decays = (one[tail_id[row]] for one in tail)
        state = before[anchor_slot[row]] if anchor_slot[row] else np.zeros(before.shape[1:])
        boundary = (start // interval + 1) * interval
        for n in range(int(anchor_length[row]), start + count):
            entry, t = n % entries, n - start
            if t >= 0:
                keys[entry] = np.asarray(k)[row, t].reshape(-1)
                decays[entry] = np.asarray(log_decay)[row, t].reshape(-1)
            # One decay for each head, or for each channel of its keys.
            state = np.exp(decays[entry].astype(np.float64)).reshape(heads, 1, -1) * state
            key = by_head(keys[entry])
            if t >= 0:
                added = beta[row, t][:, None] * (values[row, t] - (state * key).sum(-1))
                u[entry] = added.astype(u.dtype).reshape(-1)
            state = state + u[entry].astype(np.float64).reshape(heads, head_dim, 1) * key
            if t >= 0:
                y[row, t] = (state * by_head(q[row, t])).sum(-1)
            if n + 1 == boundary and write_slot[row]:
                after[write_slot[row]] = state.astype(after.dtype)
    return y, after, tail
