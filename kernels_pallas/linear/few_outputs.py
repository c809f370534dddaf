"""The product with few outputs on GPU, such as the decays of a gated delta net: apart from other products of its input.

XLA merges products of one input into one, whose weight is all of theirs. It reads them as they lie only if their
outputs are multiples of a tile; otherwise it copies all of them for each call: 50 MB for the projections of a layer of
Qwen3-Next-80B-A3B, because 32 outputs of two of them are no tile. For the rows of a decode step the product here is a
sum, which XLA does not merge, and which it computes together with what follows. Two such products of one input are one
reduction, which is one kernel. A pair may also have 128 outputs each, as the gates of Kimi-Linear: these are tiles, but
XLA copied the weights all the same.
"""

import jax.numpy as jnp
from jax import lax

from kernels_pallas.linear import xla

TILE = 64
MOST_OUTPUTS = 256
MOST_ROWS = 64


def unsupported(x, weight, *, out_dtype):
    if weight.shape[0] % TILE == 0 or weight.shape[0] > MOST_OUTPUTS:
        return f"{weight.shape[0]} outputs, a multiple of {TILE} or more than {MOST_OUTPUTS}"
    return None


def linear(x, weight, *, out_dtype):
    if len(x) > MOST_ROWS:
        return xla.linear(lax.optimization_barrier(x), weight, out_dtype=out_dtype)
    return (x[:, None, :].astype(jnp.float32) * weight.astype(jnp.float32)).sum(-1).astype(out_dtype)


def pair_unsupported(x, first, second, *, out_dtype):
    if len(x) > MOST_ROWS:
        return f"more than {MOST_ROWS} rows"
    if len(first) > MOST_OUTPUTS:
        return f"{len(first)} outputs, more than {MOST_OUTPUTS}"
    return None


def linear_pair(x, first, second, *, out_dtype):
    # Without the barrier, XLA would sum what x was rounded from, and round it for other products in one more kernel.
    wide = lax.optimization_barrier(x)[:, None, :].astype(jnp.float32)
    products = wide * first.astype(jnp.float32), wide * second.astype(jnp.float32)
    zero = jnp.float32(0)
    sums = lax.reduce(products, (zero, zero), lambda a, b: (a[0] + b[0], a[1] + b[1]), (2,))
    return tuple(one.astype(out_dtype) for one in sums)
