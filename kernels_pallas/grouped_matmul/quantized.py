"""The grouped product with weights in few bits, in plain JAX; see `xla.py` for the dense one.

On CPU, a loop over blocks of tokens, which widens the weights of one expert at a time.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.dispatch import differentiable
from kernels_pallas.grouped_matmul.xla import loop_over_blocks, ragged

F32 = jnp.float32


def grouped_matmul(x, w, group_sizes):
    by_platform = partial(lax.platform_dependent, cpu=by_blocks, default=_ragged)
    return by_channel(x, w, group_sizes, differentiable(by_platform, _ragged)(x, w, group_sizes))


def by_channel(x, w, group_sizes, product):
    """Returns the product times the scale of each channel, which is each token's expert's, in x's dtype."""
    if w.channel_scale is not None:
        ends = jnp.cumsum(group_sizes)
        expert = jnp.searchsorted(ends, jnp.arange(x.shape[0]), side="right", method="compare_all")
        product = product * jnp.take(w.channel_scale.astype(F32), expert, axis=0, mode="clip")
    return product.astype(x.dtype)


def _ragged(x, w, group_sizes):
    return ragged(x, w.widened(x.dtype), group_sizes)


def _multiply(rows, weight):
    return jnp.einsum("ti,oi->to", rows, weight.widened(rows.dtype), preferred_element_type=F32)


def by_blocks(x, w, group_sizes, multiply=_multiply):
    """Returns the product without the scale of each channel, in float32; `multiply` takes rows of one expert."""

    def multiply_rows(rows, expert, _):
        one = jax.tree.map(lambda v: lax.dynamic_index_in_dim(v, expert, keepdims=False), w)
        return multiply(rows, one)

    return loop_over_blocks(multiply_rows, x, group_sizes, w.shape[1])
