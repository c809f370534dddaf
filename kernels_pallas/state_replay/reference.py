"""The replay's definition: the recurrence from the anchor over every token since, in float64 numpy."""

import numpy as np


def state_replay(
    states, tail, x, dt, a, b, c, d, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot, interval
):
    """Implements `api.state_replay` on numpy arrays. Returns y in float64, states and tail in their dtypes."""
    before, after = np.asarray(states).astype(np.float64), np.array(states)
    tail = tuple(np.array(v) for v in tail)
    x, dt, b, c = (np.asarray(v) for v in (x, dt, b, c))
    a, d = (np.asarray(v).astype(np.float64) for v in (a, d))
    entries, y = tail[0].shape[1], np.zeros(x.shape)
    for row in range(x.shape[0]):
        start, count = int(length[row]), int(num_tokens[row])
        if not count:
            continue
        ring = [v[tail_id[row]] for v in tail]
        for t in range(count):
            for kept, new in zip(ring, (x, b, dt), strict=True):
                kept[(start + t) % entries] = new[row, t].reshape(-1)
        state = before[anchor_slot[row]] if anchor_slot[row] else np.zeros(before.shape[1:])
        boundary = (start // interval + 1) * interval
        for n in range(int(anchor_length[row]), start + count):
            xn, bn, dtn = (kept[n % entries].astype(np.float64) for kept in ring)
            state = token(state, xn.reshape(x.shape[2:]), bn.reshape(b.shape[2:]), dtn, a)
            if n >= start:
                y[row, n - start] = (state * by_head(c[row, n - start], x.shape[2])).sum(-1)
                y[row, n - start] += d[:, None] * xn.reshape(x.shape[2:])
            if n + 1 == boundary and write_slot[row]:
                after[write_slot[row]] = state.astype(after.dtype)
    return y, after, tail


def token(state, x, b, dt, a):
    """The state after one more token: state [heads, head_dim, state], x [heads, head_dim], b [groups, state]."""
    fed = (dt[:, None] * x)[:, :, None] * by_head(b, len(x))
    return np.exp(dt * a)[:, None, None] * state + fed


def by_head(v, heads):
    """[groups, state] as [heads, 1, state]."""
    return np.repeat(v.astype(np.float64), heads // len(v), axis=0)[:, None, :]
