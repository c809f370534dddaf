"""The grouped product of a few tokens in C++, for CPU: weights of the experts in use are streamed once (`native/*.cc`).

With many tokens an expert, XLA's products of matrices are faster. Weights are float32, bfloat16, or int8 with a scale
for each channel. Each row is added in one order, for any number of rows.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import fixed_order, native
from kernels_pallas.grouped_matmul import quantized

F32 = jnp.float32
_MOST_TOKENS_PER_EXPERT = 2


def unsupported(x, w, group_sizes):
    if w.dtype not in (F32, jnp.bfloat16):
        return f"weights are {w.dtype}, not float32 or bfloat16"
    return _too_many(x, w) or native.WHY_MISSING


def unsupported_quantized(x, w, group_sizes):
    if not w.is_int8_by_channel:
        return "weights are not in int8 with a scale for each channel"
    return _too_many(x, w) or native.WHY_MISSING


def _too_many(x, w):
    if x.shape[0] > _MOST_TOKENS_PER_EXPERT * w.shape[0]:
        return f"{x.shape[0]} tokens, not 1 to {_MOST_TOKENS_PER_EXPERT} for each of {w.shape[0]} experts"
    return None


def grouped_matmul(x, w, group_sizes):
    return _product(x, w, group_sizes).astype(x.dtype)


def quantized_grouped_matmul(x, w, group_sizes):
    """See `api.grouped_matmul`; other weights than int8 by channel are widened, an expert at a time."""
    if w.is_int8_by_channel:
        product = _product(x, w.values, group_sizes)
    else:

        def multiply(rows, one):
            return fixed_order.product(rows, one.widened(x.dtype))

        product = quantized.by_blocks(x, w, group_sizes, multiply)
    return fixed_order.rounded(quantized.by_channel(x, w, group_sizes, product))


def _product(x, w, group_sizes):
    call = jax.ffi.ffi_call(native.target("grouped_matmul"), jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), F32))
    return call(native.operand(x, w), w, group_sizes.astype(jnp.int32))
