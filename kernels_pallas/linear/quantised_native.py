"""The dense product of a few rows with a weight in int8 in C++, for CPU: streams the weight once (`native/linear.cc`).

XLA's own form writes a wide copy of the weight to memory in each call, which costs more than the narrow one saves, and
much more than the products of a batch.
"""

import jax
import jax.numpy as jnp

from kernels_pallas import native

_MOST_ROWS = 64


def unsupported(x, weight, *, out_dtype):
    """Returns why it cannot, or should not, run this call; or None."""
    if weight.values.dtype != jnp.int8 or weight.group_scale is not None or weight.group_zero is not None:
        return "weights are not in int8 with a scale for each channel"
    rows = x.size // max(x.shape[-1], 1)
    if not 0 < rows <= _MOST_ROWS:
        return f"{rows} rows, not 1 to {_MOST_ROWS}"
    return native.why_not("int8")


def linear(x, weight, *, out_dtype):
    """See `api.linear`."""
    product = _product(x.reshape(-1, x.shape[-1]).astype(jnp.float32), weight.values)
    if weight.channel_scale is not None:
        product = product * weight.channel_scale.astype(jnp.float32)
    return product.astype(out_dtype).reshape(*x.shape[:-1], weight.shape[0])


@jax.custom_vjp
def _product(rows, values):
    result = jax.ShapeDtypeStruct((rows.shape[0], values.shape[0]), jnp.float32)
    return jax.ffi.ffi_call(native.target("linear"), result)(rows, values)


def _forward(rows, values):
    return _product(rows, values), values


def _backward(values, cotangent):
    return cotangent @ values.astype(jnp.float32), None


_product.defvjp(_forward, _backward)
