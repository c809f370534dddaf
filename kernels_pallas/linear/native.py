"""The dense product with a weight in bfloat16 or int8 in C++, for CPU: streams the weight once (`native/dense.cc`).

XLA widens or rearranges a bfloat16 weight of few rows first. With more rows, XLA is faster on processors that have
instructions for bfloat16 products. On others it is slower than with float32 weights, and the C++ product is about as
fast as XLA's with float32 weights. Of an int8 weight XLA's own form writes a wide copy to memory in each call, which
costs more than the narrow one saves, and much more than the products of a batch.

Schedule-invariant programs compute all dense products here; `kernels_pallas.fixed_order` describes the order of sums.
"""

import jax.numpy as jnp

from kernels_pallas import fixed_order, native

_MOST_QUANTIZED_ROWS = 64


def unsupported(x, weight, *, out_dtype):
    if weight.dtype != jnp.bfloat16:
        return f"weights are {weight.dtype}, not bfloat16"
    if len(x) > native.few_rows() and native.multiplies_bfloat16():
        return f"{len(x)} rows, not 1 to {native.few_rows()}"
    return native.WHY_MISSING


def linear(x, weight, *, out_dtype):
    return fixed_order.product(x, weight, divided=True).astype(out_dtype)


def unsupported_quantized(x, weight, *, out_dtype):
    if not weight.is_int8_by_channel:
        return "weights are not in int8 with a scale for each channel"
    if len(x) > _MOST_QUANTIZED_ROWS:
        return f"{len(x)} rows, not 1 to {_MOST_QUANTIZED_ROWS}"
    return native.WHY_MISSING


def quantized_linear(x, weight, *, out_dtype):
    """See `api.linear`. Other weights than int8 by channel are widened."""
    stored = weight.values if weight.is_int8_by_channel else weight.widened(x.dtype)
    return fixed_order.rounded(weight.scaled(fixed_order.product(x, stored, divided=True))).astype(out_dtype)
