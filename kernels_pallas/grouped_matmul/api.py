"""The grouped product: w[e] @ x[t] for token t of expert e."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.grouped_matmul import native, pallas_gpu, pallas_tpu, quantized, quantized_gpu, quantized_tpu, xla
from kernels_pallas.quantized import Quantized
from kernels_pallas.shape_check import shapes_checked

MATMUL = (
    *dispatch.kernels("tpu", pallas_tpu, "grouped_matmul", own_derivative=True),
    dispatch.Implementation("pallas_gpu", pallas_gpu.grouped_matmul, pallas_gpu.unsupported, "gpu"),
    dispatch.Implementation("native", native.grouped_matmul, native.unsupported, "cpu"),
    *fixed_order.implementations(native.grouped_matmul, None),
    dispatch.Implementation("xla", xla.grouped_matmul),
)
QUANTIZED = (
    *dispatch.kernels("tpu", quantized_tpu, "grouped_matmul"),
    dispatch.Implementation(
        "pallas_tpu_codes", partial(quantized_tpu.grouped_matmul, codes=True), quantized_tpu.unsupported, "tpu"
    ),
    dispatch.Implementation("pallas_gpu", quantized_gpu.grouped_matmul, quantized_gpu.unsupported, "gpu"),
    dispatch.Implementation("pallas_gpu_widened", pallas_gpu.widened, pallas_gpu.unsupported_widened, "gpu"),
    dispatch.Implementation("native", native.quantized_grouped_matmul, native.unsupported_quantized, "cpu"),
    *fixed_order.implementations(native.quantized_grouped_matmul, None),
    dispatch.Implementation("xla", quantized.grouped_matmul),
)


@shapes_checked
def grouped_matmul(
    x: Float[Array, "tokens inputs"],
    w: Float[Array, "experts outputs inputs"] | Quantized,
    group_sizes: Int[Array, " experts"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens outputs"]:
    """Multiplies the first group_sizes[0] tokens by w[0], the next group_sizes[1] by w[1], and so on.

    Sums are float32, the result is in x's dtype; differentiable in x, and in w unless it is quantized.

    Args:
        x: tokens sorted by expert.
        w: one weight per expert; quantized ones are widened to x's dtype inside of the product.
        group_sizes: tokens per expert. Their sum may be less than the number of tokens: the rest gives 0.
    """
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    if isinstance(w, Quantized):
        return dispatch.call("quantized_grouped_matmul", QUANTIZED, implementation, x, w, group_sizes)
    return dispatch.call("grouped_matmul", MATMUL, implementation, x, w, group_sizes)
