"""The grouped product of a few tokens in C++, for CPU: weights of the experts in use are streamed once (`native/*.cc`).

With many tokens an expert, XLA's products of matrices are faster.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.grouped_matmul import xla

_MOST_TOKENS_PER_EXPERT = 2


def unsupported(x, w, group_sizes):
    """Returns why it cannot, or should not, run this call; or None."""
    if w.dtype not in (jnp.float32, jnp.bfloat16):
        return f"weights are {w.dtype}, not float32 or bfloat16"
    if not 0 < x.shape[0] <= _MOST_TOKENS_PER_EXPERT * w.shape[0]:
        return f"{x.shape[0]} tokens, not 1 to {_MOST_TOKENS_PER_EXPERT} for each of {w.shape[0]} experts"
    return native.WHY_MISSING


@jax.custom_vjp
def grouped_matmul(x, w, group_sizes):
    """See `api.grouped_matmul`."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call(native.target("grouped_matmul"), result)
    return call(native.operand(x, w), w, group_sizes.astype(jnp.int32)).astype(x.dtype)


def _forward(x, w, group_sizes):
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(saved, cotangent):
    x, w, group_sizes = saved
    gradients = jax.vjp(lambda x, w: xla.grouped_matmul(x, w, group_sizes), x, w)[1](cotangent)
    return *gradients, None


grouped_matmul.defvjp(_forward, _backward)
