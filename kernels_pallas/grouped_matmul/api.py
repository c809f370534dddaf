"""Public form of the grouped product: token t of expert e gives w[e] @ x[t]."""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.grouped_matmul import pallas_tpu, xla
from kernels_pallas.shape_check import check_shapes

MATMUL = (*dispatch.kernels("tpu", pallas_tpu, "grouped_matmul"), dispatch.Implementation("xla", xla.grouped_matmul))


def grouped_matmul(
    x: Float[Array, "tokens inputs"],
    w: Float[Array, "experts outputs inputs"],
    group_sizes: Int[Array, " experts"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens outputs"]:
    """Multiplies the first group_sizes[0] tokens by w[0], the next group_sizes[1] by w[1], and so on.

    Sums are float32, the result is in x's dtype; differentiable in x and w.

    Args:
        x: tokens sorted by expert.
        group_sizes: tokens per expert. Their sum may be less than the number of tokens: the rest gives 0.
    Raises:
        ValueError: shapes that do not fit together.
        UnsupportedError: the implementation named does not exist or cannot run this call.
    """
    check_shapes(
        "grouped_matmul",
        x=(x, "tokens inputs"),
        w=(w, "experts outputs inputs"),
        group_sizes=(group_sizes, "experts"),
    )
    return dispatch.call("grouped_matmul", MATMUL, implementation, x, w, group_sizes)
