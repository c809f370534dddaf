"""The definition, one token after the other, in float64 numpy."""

import numpy as np


def average(x, dt, rate, state):
    """y [length, heads, head_dim] and the last state, of one row: x [length, heads, head_dim], dt [length, heads]."""
    y, state = np.zeros(x.shape), np.asarray(state, np.float64)
    for t in range(len(x)):
        keep = np.exp(-np.asarray(rate, np.float64) * dt[t])[:, None]
        state = keep * state + (1 - keep) * x[t]
        y[t] = state
    return y, state
