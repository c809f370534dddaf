"""The choice of each token's experts by their scores, and the order of tokens by expert."""

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.expert_choice import pallas_gpu, xla
from kernels_pallas.expert_choice.rule import Choice, Rule
from kernels_pallas.shape_check import shapes_checked

CHOICE = (
    *dispatch.kernels("gpu", pallas_gpu, "choose_experts"),
    dispatch.Implementation("xla", xla.choose_experts),
)


@shapes_checked
def choose_experts(
    scores: Float[Array, "T experts"],
    bias: Float[Array, " experts"] | None,
    valid: Bool[Array, " T"],
    first: Int[Array, ""],
    *,
    own: int,
    rule: Rule,
    implementation: str | None = None,
) -> Choice:
    """Chooses the experts with the largest scores, the first of equal ones, and sorts tokens by them.

    The weights are differentiable in the scores and the bias.

    Args:
        scores: float32.
        bias: added to the scores for the choice, not for the weights.
        valid: false for padding, which goes through no expert.
        first: the first expert of this device, which has `own` of them. Ignored if it has all.
    """
    return dispatch.call("expert_choice", CHOICE, implementation, scores, bias, valid, first, own=own, rule=rule)
