"""The dense product's definition, in float64 numpy."""

import numpy as np


def linear(x, weight, *, out_dtype=None):
    """Implements `api.linear`, in float64."""
    x, weight = (np.asarray(v).astype(np.float64) for v in (x, weight))
    out = np.zeros((*x.shape[:-1], weight.shape[0]))
    for index in np.ndindex(*x.shape[:-1]):
        for o in range(weight.shape[0]):
            out[(*index, o)] = (x[index] * weight[o]).sum()
    return out
