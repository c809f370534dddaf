"""The dense product y = x W^T. Implementations take x as rows [n, inputs]."""

from functools import partial

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.linear import few_outputs, narrow_inputs, native, quantized_gpu, quantized_tpu, xla
from kernels_pallas.quantized import Quantized
from kernels_pallas.shape_check import shapes_checked


def _apart(x: Array, *weights: Array, out_dtype: DTypeLike) -> tuple[Array, ...]:
    return tuple(linear(x, weight, out_dtype=out_dtype) for weight in weights)


LINEAR = (
    dispatch.Implementation("native", native.linear, native.unsupported, "cpu"),
    *fixed_order.implementations(native.linear, native.linear),
    dispatch.Implementation("xla_few_outputs", few_outputs.linear, few_outputs.unsupported, "gpu"),
    dispatch.Implementation("xla", xla.linear),
)
PAIR = (
    dispatch.Implementation("xla_few_outputs", few_outputs.linear_pair, few_outputs.pair_unsupported, "gpu"),
    *fixed_order.implementations(_apart, _apart),
    dispatch.Implementation("apart", _apart),
)
QUANTIZED = (
    # The name alone means the first: what a TPU cannot multiply, it can be told to.
    dispatch.Implementation("narrow_inputs", narrow_inputs.linear, narrow_inputs.undefined, "gpu"),
    dispatch.Implementation("narrow_inputs", narrow_inputs.linear, narrow_inputs.unsupported_on_tpu, "tpu"),
    *dispatch.kernels("tpu", quantized_tpu, "linear"),
    dispatch.Implementation(
        "pallas_tpu_codes", partial(quantized_tpu.linear, codes=True), quantized_tpu.unsupported, "tpu"
    ),
    dispatch.Implementation("pallas_gpu", quantized_gpu.linear, quantized_gpu.unsupported, "gpu"),
    dispatch.Implementation("native", native.quantized_linear, native.unsupported_quantized, "cpu"),
    *fixed_order.implementations(native.quantized_linear, native.quantized_linear),
    dispatch.Implementation("xla", xla.quantized_linear),
)


@shapes_checked
def linear(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "outputs inputs"] | Quantized,
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch outputs"]:
    """y = x W^T, accumulated in float32. Differentiable, in x only where the weight is quantized.

    Args:
        weight: as Hugging Face checkpoints store it; a quantized one is widened to x's dtype inside of the product. One
            that has a scale for its inputs is multiplied by inputs as narrow as it is, where a device does so.
        out_dtype: of the result; x's own if None.
    """
    if 0 in (*x.shape, *weight.shape):
        return jnp.zeros((*x.shape[:-1], weight.shape[0]), out_dtype or x.dtype)
    operation, table = ("quantized_linear", QUANTIZED) if isinstance(weight, Quantized) else ("linear", LINEAR)
    rows = x.reshape(-1, x.shape[-1])
    out = dispatch.call(operation, table, implementation, rows, weight, out_dtype=out_dtype or x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


@shapes_checked
def linear_pair(
    x: Float[Array, "*batch inputs"],
    first: Float[Array, "outputs inputs"],
    second: Float[Array, "outputs inputs"],
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch outputs"], Float[Array, "*batch outputs"]]:
    """x W^T of two weights of one shape, as `linear` computes it."""
    if 0 in (*x.shape, *first.shape):
        return linear(x, first, out_dtype=out_dtype), linear(x, second, out_dtype=out_dtype)
    rows, options = x.reshape(-1, x.shape[-1]), {"out_dtype": out_dtype or x.dtype}
    pair = dispatch.call("linear_pair", PAIR, implementation, rows, first, second, **options)
    one, other = (out.reshape(*x.shape[:-1], len(first)) for out in pair)
    return one, other
