"""The MLPs of a mixture of experts: down[e] @ act(up[e] @ x[t]) for each token t and each of its experts e.

At a few tokens the launches of the products, the activation and the gathers of rows take a GPU a good part of a layer's
time; as one operation they are two kernels. Source: Shazeer et al. ("Outrageously Large Neural Networks", 2017); with
gates as in Shazeer ("GLU Variants Improve Transformer", 2020).
"""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.expert_mlp import pallas_gpu, xla
from kernels_pallas.quantized import Quantized
from kernels_pallas.shape_check import shapes_checked

MLP = (
    *dispatch.kernels("gpu", pallas_gpu, "expert_mlp"),
    dispatch.Implementation("xla", xla.expert_mlp),
)


@shapes_checked
def expert_mlp(
    x: Float[Array, "T inputs"],
    up: Float[Array, "experts outputs inputs"] | Quantized,
    down: Float[Array, "experts inputs size"] | Quantized,
    order: Int[Array, " pairs"],
    place: Int[Array, " pairs"],
    sizes: Int[Array, " experts"],
    *,
    activation: Callable[[Array], Array],
    implementation: str | None = None,
) -> Float[Array, "T chosen inputs"]:
    """Applies each token's experts to it.

    Products are summed in float32 and rounded to x's dtype, as is the activation. Differentiable in x and the weights,
    unless these are quantized.

    Args:
        up: the result is act(up), or with twice as many outputs as down has inputs (the gate's first) act(gate) * up.
        order: the field of `kernels_pallas.expert_choice.Choice`, as the next two. A row is a token with one of its
            experts. Rows of no expert give 0.
        place: likewise.
        sizes: likewise.
        activation: a function of each number, 0 for 0.
    """
    return dispatch.call("expert_mlp", MLP, implementation, x, up, down, order, place, sizes, activation=activation)


multiply_rows = xla.multiply_rows
