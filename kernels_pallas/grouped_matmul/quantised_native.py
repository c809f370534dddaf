"""The grouped product of a few tokens with weights in int8 in C++, for CPU; see `native.py` for wide ones."""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.grouped_matmul import quantised
from kernels_pallas.grouped_matmul.quantised import by_channel

_MOST_TOKENS_PER_EXPERT = 2


def unsupported(x, w, group_sizes):
    """Returns why it cannot, or should not, run this call; or None."""
    if w.values.dtype != jnp.int8 or w.group_scale is not None or w.group_zero is not None:
        return "weights are not in int8 with a scale for each channel"
    if not 0 < x.shape[0] <= _MOST_TOKENS_PER_EXPERT * w.shape[0]:
        return f"{x.shape[0]} tokens, not 1 to {_MOST_TOKENS_PER_EXPERT} for each of {w.shape[0]} experts"
    return native.why_not("int8")


@jax.custom_vjp
def grouped_matmul(x, w, group_sizes):
    """See `api.grouped_matmul`."""
    result = jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), jnp.float32)
    call = jax.ffi.ffi_call(native.target("grouped_matmul"), result)
    product = call(x.astype(jnp.float32), w.values, group_sizes.astype(jnp.int32))
    return by_channel(x, w, group_sizes, product)


def _forward(x, w, group_sizes):
    return grouped_matmul(x, w, group_sizes), (x, w, group_sizes)


def _backward(saved, cotangent):
    x, w, group_sizes = saved
    (dx,) = jax.vjp(lambda x: quantised.grouped_matmul(x, w, group_sizes), x)[1](cotangent)
    return dx, None, None


grouped_matmul.defvjp(_forward, _backward)
