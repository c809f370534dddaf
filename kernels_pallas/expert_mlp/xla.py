"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.grouped_matmul import grouped_matmul


def expert_mlp(x, up, down, order, place, sizes, *, activation):
    chosen = max(1, order.shape[0] // max(1, x.shape[0]))
    out = multiply_rows(x[order // chosen], up, down, sizes, activation)
    return out[place].reshape(x.shape[0], chosen, out.shape[1])


def multiply_rows(x, up, down, sizes, activation, *, add_up=None, add_down=None):
    """Returns the result for rows [rows, inputs] sorted by expert, `sizes` of them for each; later rows give 0.

    add_up, add_down: what adapters add to the products, as functions of the rows that the products take.
    """
    inner = grouped_matmul(x, up, sizes)
    if add_up is not None:
        inner = inner + add_up(x)
    if up.shape[1] == 2 * down.shape[2]:
        gate, inner = jnp.split(inner, 2, axis=1)
        inner = activation(gate) * inner
    else:
        inner = activation(inner)
    out = grouped_matmul(inner, down, sizes)
    return out if add_down is None else out + add_down(inner)
