"""The dense product of a few rows with a 16-bit weight in C++, for CPU: streams the weight once (`native/linear.cc`).

Of these, XLA's own form widens or rearranges the weight first. With a float32 weight it streams as fast, and with more
rows it is faster with 16 bits as well, by instructions made for them.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native
from kernels_pallas.linear import xla

_MOST_ROWS = 8


def unsupported(x, weight, *, out_dtype):
    """Why it cannot, or should not, run this call; or None."""
    if weight.dtype != jnp.bfloat16:
        return f"weights are {weight.dtype}, not bfloat16"
    rows = x.size // max(x.shape[-1], 1)
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows, not 1 to {_MOST_ROWS}"
    return native.WHY_MISSING


def linear(x, weight, *, out_dtype):
    """See `api.linear`."""
    rows = x.reshape(-1, x.shape[-1])
    return _product(rows, weight).astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


@jax.custom_vjp
def _product(rows, weight):
    result = jax.ShapeDtypeStruct((rows.shape[0], weight.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(native.target("linear"), result)(rows.astype(jnp.float32), weight)


def _forward(rows, weight):
    return _product(rows, weight), (rows, weight)


def _backward(saved, cotangent):
    return jax.vjp(lambda rows, weight: xla.linear(rows, weight, out_dtype=jnp.float32), *saved)[1](cotangent)


_product.defvjp(_forward, _backward)
