"""The dense product with a weight in bfloat16 in C++, for CPU: streams the weight once (`native/linear.cc`).

XLA widens or rearranges the weight of few rows first. With more rows, XLA is faster on processors that have
instructions for bfloat16 products. On others it is slower than with float32 weights, and the C++ product is about as
fast as XLA's with float32 weights.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.linear import xla


def unsupported(x, weight, *, out_dtype):
    """Returns why it cannot, or should not, run this call; or None."""
    if weight.dtype != jnp.bfloat16:
        return f"weights are {weight.dtype}, not bfloat16"
    rows = x.size // max(x.shape[-1], 1)
    if rows == 0 or (rows > native.few_rows() and native.multiplies_bfloat16()):
        return f"{rows} rows, not 1 to {native.few_rows()}"
    return native.WHY_MISSING


def linear(x, weight, *, out_dtype):
    """See `api.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, weight).astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


@jax.custom_vjp
def _product(rows, weight):
    result = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(native.target("linear"), result)(native.operand(rows, weight), weight)


def _forward(rows, weight):
    return _product(rows, weight), (rows, weight)


def _backward(saved, cotangent):
    return jax.vjp(lambda rows, weight: xla.linear(rows, weight, out_dtype=jnp.float32), *saved)[1](cotangent)


_product.defvjp(_forward, _backward)
