"""Float32 arithmetic whose order and rounding schedule-invariant programs fix; see `kernels_pallas.invariant`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import dispatch, invariant


def row_sum(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """The sum over the last axis, which is kept."""
    return invariant.row_sum(x) if _fixed() else x.sum(-1, keepdims=True)


def log_sum_exp(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """log(sum(exp(x))) over the last axis, which is kept."""
    if not _fixed():
        return jax.nn.logsumexp(x, axis=-1, keepdims=True)
    highest = x.max(-1, keepdims=True)
    # If all values are -inf, or one is inf: avoids inf - inf.
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    return base + jnp.log(invariant.row_sum(jnp.exp(x - base)))


def rounded(product: Array) -> Array:
    """Returns a product that a sum takes next; schedule-invariant programs round it first.

    Without this, the compiler decides for each program whether product and sum are one instruction that rounds once.
    """
    return invariant.rounded(product) if _fixed() else product


def _fixed() -> bool:
    return dispatch.named_choice() == invariant.NAME
