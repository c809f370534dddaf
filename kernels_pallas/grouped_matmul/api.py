"""The grouped product: w[e] @ x[t] for token t of expert e."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.grouped_matmul import native, pallas_gpu, pallas_tpu, quantised, quantised_gpu, quantised_tpu, xla
from kernels_pallas.quantised import Quantised
from kernels_pallas.shape_check import shapes_checked

MATMUL = (
    *dispatch.kernels("tpu", pallas_tpu, "grouped_matmul", own_derivative=True),
    dispatch.Implementation("pallas_gpu", pallas_gpu.grouped_matmul, pallas_gpu.unsupported, "gpu"),
    dispatch.Implementation("native", native.grouped_matmul, native.unsupported, "cpu"),
    fixed_order.implementation(native.grouped_matmul),
    dispatch.Implementation("xla", xla.grouped_matmul),
)
QUANTISED = (
    *dispatch.kernels("tpu", quantised_tpu, "grouped_matmul"),
    dispatch.Implementation(
        "pallas_tpu_codes", partial(quantised_tpu.grouped_matmul, codes=True), quantised_tpu.unsupported, "tpu"
    ),
    dispatch.Implementation("pallas_gpu", quantised_gpu.grouped_matmul, quantised_gpu.unsupported, "gpu"),
    dispatch.Implementation("pallas_gpu_widened", pallas_gpu.widened, pallas_gpu.unsupported_widened, "gpu"),
    dispatch.Implementation("native", native.quantised_grouped_matmul, native.unsupported_quantised, "cpu"),
    fixed_order.implementation(native.quantised_grouped_matmul),
    dispatch.Implementation("xla", quantised.grouped_matmul),
)


@shapes_checked
def grouped_matmul(
    x: Float[Array, "tokens inputs"],
    w: Float[Array, "experts outputs inputs"] | Quantised,
    group_sizes: Int[Array, " experts"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens outputs"]:
    """Multiplies the first group_sizes[0] tokens by w[0], the next group_sizes[1] by w[1], and so on.

    Sums are float32, the result is in x's dtype; differentiable in x, and in w unless it is quantised.

    Args:
        x: tokens sorted by expert.
        w: one weight per expert; quantised ones are widened to x's dtype inside of the product.
        group_sizes: tokens per expert. Their sum may be less than the number of tokens: the rest gives 0.
    """
    if 0 in (*x.shape, *w.shape):
        return jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    if isinstance(w, Quantised):
        return dispatch.call("quantised_grouped_matmul", QUANTISED, implementation, x, w, group_sizes)
    return dispatch.call("grouped_matmul", MATMUL, implementation, x, w, group_sizes)
