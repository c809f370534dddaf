"""The dense product of inputs that are rounded to the weight's 8-bit dtype, by the checkpoint's scale for inputs.

    q = round(x / input_scale), to int8 or float8_e4m3fn;    y = (q . values) * input_scale * channel_scale

as the formats with such scales define it. Their authors evaluated this form, and the matrix unit multiplies both narrow
operands: int8 on TPUs before TPU7x and on GPUs, float8 on TPU7x and on GPUs since Ada.
"""

import jax.numpy as jnp
from jax import lax

from kernels_pallas import dispatch

F32 = jnp.float32


def undefined(x, weight, *, out_dtype):
    """Returns why this form does not support the call, or None."""
    if weight.input_scale is None:
        return "the checkpoint has no scale for its inputs"
    if weight.of_groups:
        return "scales of groups lie between values and product"
    if weight.values.dtype not in (jnp.int8, jnp.float8_e4m3fn):
        return f"weights are {weight.values.dtype}, neither int8 nor float8_e4m3fn"
    return None


def unsupported_on_tpu(x, weight, *, out_dtype):
    """Returns the same for the TPU of this machine, or a described one."""
    seventh, integers = "7" in dispatch.device_kind(), weight.values.dtype == jnp.int8
    if weight.input_scale is not None and seventh == integers:
        return f"{dispatch.device_kind() or 'this TPU'} does not multiply {weight.values.dtype}"
    return undefined(x, weight, out_dtype=out_dtype)


def linear(x, weight, *, out_dtype):
    # One product computes all outputs, so joined weights use the largest of their input scales.
    scale = weight.input_scale.astype(F32).max()
    narrow = _rounded(x.astype(F32) / scale, weight.values.dtype)
    total = jnp.int32 if narrow.dtype == jnp.int8 else F32
    product = lax.dot_general(narrow, weight.values, (((1,), (1,)), ((), ())), preferred_element_type=total)
    return weight.scaled(product.astype(F32) * scale).astype(out_dtype)


def _rounded(x, dtype):
    """Rounds to the nearest value, ties to even. Values out of range become the largest value."""
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x), -128, 127).astype(dtype)
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -most, most).astype(dtype)
