"""The definition of the MLPs of experts, in numpy: one row after the other."""

import jax.numpy as jnp
import numpy as np


def expert_mlp(x, up, down, order, place, sizes, *, activation):
    """See `api.expert_mlp`. Everything is float64 but the activation."""
    x, up, down = (np.asarray(v, np.float64) for v in (x, up, down))
    chosen = len(order) // len(x)
    out = np.zeros((len(order), down.shape[1]))
    for expert, row in zip(np.repeat(np.arange(len(sizes)), sizes), order, strict=False):
        *gate, inner = np.split(up[expert] @ x[row // chosen], up.shape[1] // down.shape[2])
        act = np.asarray(activation(jnp.asarray(gate[0] if gate else inner, jnp.float32)))
        out[row] = down[expert] @ (act * inner if gate else act)
    return out.reshape(len(x), chosen, -1)
