"""Float32 arithmetic whose order and rounding schedule-invariant programs fix; see `kernels_pallas.invariant`."""

import functools
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels_pallas import dispatch, invariant

FEW_TOKENS = 8
"""Of a router: for more of them, sums read its weight too often."""


def row_sum(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """The sum over the last axis, which is kept."""
    return invariant.row_sum(x) if is_fixed() else x.sum(-1, keepdims=True)


def row_max(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """The maximum over the last axis, which is kept."""
    return invariant.row_max(x) if is_fixed() else x.max(-1, keepdims=True)


def exp(x: Array) -> Array:
    """exp(x); schedule-invariant programs compute it, and the functions below, in C++."""
    return invariant.elementwise("exp", x) if is_fixed() else jnp.exp(x)


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return invariant.elementwise("sigmoid", x) if is_fixed() else jax.nn.sigmoid(x)


def silu(x: Array) -> Array:
    """x sigmoid(x)."""
    return invariant.elementwise("silu", x) if is_fixed() else jax.nn.silu(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x))."""
    return invariant.elementwise("softplus", x) if is_fixed() else jax.nn.softplus(x)


def log_sum_exp(x: Float[Array, "*batch n"]) -> Float[Array, "*batch 1"]:
    """log(sum(exp(x))) over the last axis, which is kept."""
    if not is_fixed():
        return jax.nn.logsumexp(x, axis=-1, keepdims=True)
    highest = invariant.row_max(x)
    # If all values are -inf, or one is inf: avoids inf - inf.
    base = jnp.where(jnp.isfinite(highest), highest, 0)
    return base + invariant.elementwise("log", invariant.row_sum(exp(x - base)))


def softmax(x: Float[Array, "*batch n"]) -> Float[Array, "*batch n"]:
    """exp(x) over its sum over the last axis."""
    if not is_fixed():
        return jax.nn.softmax(x, axis=-1)
    shares = exp(x - invariant.row_max(x))
    return invariant.quotient(shares, invariant.row_sum(shares))


def quotient(x: Float[Array, "*batch n"], total: Float[Array, "... 1"]) -> Float[Array, "*batch n"]:
    """x / total."""
    return invariant.quotient(x, total) if is_fixed() else x / total


def weighted_sum(weights: Float[Array, "T n"], values: Float[Array, "T n size"]) -> Float[Array, "T size"]:
    """The sum of a few values times their weights, in the order of the values."""
    if not is_fixed():
        return jnp.einsum("tn,tni->ti", weights, values)
    return functools.reduce(operator.add, (rounded(weights[:, n, None] * values[:, n]) for n in range(values.shape[1])))


def product_by_head(x: Float[Array, "T heads inputs"], weight: Float[Array, "heads outputs inputs"]) -> Array:
    """A product for each head [T, heads, outputs], summed in float32 and rounded once to x's dtype."""
    if is_fixed():
        heads = [invariant.product(x[:, h], weight[h]) for h in range(x.shape[1])]
        return jnp.stack(heads, axis=1).astype(x.dtype)
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum("thi,hoi->tho", x, weight, precision=precision, preferred_element_type=jnp.float32).astype(
        x.dtype
    )


def router_product(x: Float[Array, "T inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "T outputs"]:
    """x W^T in float32, at the highest precision."""
    x = x.astype(jnp.float32)
    if is_fixed():
        return invariant.product(x, weight)
    whole = functools.partial(
        lax.dot_general, dimension_numbers=(((1,), (1,)), ((), ())), precision=lax.Precision.HIGHEST
    )
    if x.shape[0] > FEW_TOKENS:
        return whole(x, weight)
    return lax.platform_dependent(x, weight, cuda=products_as_sums, default=whole)


def products_as_sums(x: Float[Array, "T inputs"], weight: Float[Array, "outputs inputs"]) -> Float[Array, "T outputs"]:
    """The product as sums: XLA for GPU computes them together with what follows."""
    return (x[:, None, :] * weight).sum(-1)


def rounded(product: Array) -> Array:
    """Returns a product that a sum takes next; schedule-invariant programs round it first.

    Without this, the compiler decides for each program whether product and sum are one instruction that rounds once.
    """
    return invariant.rounded(product) if is_fixed() else product


def is_fixed() -> bool:
    """Whether the program is schedule-invariant."""
    return dispatch.named_choice() == invariant.NAME
