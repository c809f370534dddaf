"""How experts are chosen and weighted, and the result."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from jaxtyping import Array, Float, Int


@dataclass(frozen=True)
class Rule:
    """The choice of a token's experts by their scores, and the weights of the chosen ones."""

    count: int
    """Experts of a token."""
    weights: Literal["softmax", "scores"]
    """The softmax over the scores of the chosen experts, or these scores."""
    normalize: bool = False
    """Whether scores are divided by their sum over the chosen experts plus 1e-20."""
    scaling: float = 1.0
    """Factor on scores."""
    num_groups: int = 1
    """Experts are in this many groups of equal size, in their order."""
    top_groups: int = 1
    """A token's experts come from this many groups: those with the largest sum of their best two experts."""


class Choice(NamedTuple):
    """The experts of T tokens, of which this device has `own`; a row is a token with one of its experts."""

    weights: Float[Array, "T chosen"]
    chosen: Int[Array, "T chosen"]
    """Numbers among all experts, the best first."""
    order: Int[Array, " T*chosen"]
    """Rows (token * chosen + place among its experts) sorted by this device's experts, then by number. Those of padding
    and of other devices' experts are last."""
    place: Any
    """Where each row is in `order` [T*chosen]."""
    sizes: Int[Array, " own"]
    """Rows of each of this device's experts."""
