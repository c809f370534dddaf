"""Public form of the dense product y = x W^T."""

from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.linear import xla

LINEAR = (dispatch.Implementation("xla", xla.linear),)


def linear(
    x: Float[Array, "*batch inputs"],
    weight: Float[Array, "outputs inputs"],
    *,
    out_dtype: DTypeLike | None = None,
    implementation: str | None = None,
) -> Float[Array, "*batch outputs"]:
    """y = x W^T, accumulated in float32. Differentiable.

    Args:
        weight: as Hugging Face checkpoints store it.
        out_dtype: of the result; x's own if None.
    Raises:
        ValueError: shapes that do not fit together.
        UnsupportedError: the implementation named does not exist or cannot run this call.
    """
    if weight.ndim != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(f"linear: x {x.shape} and weight {weight.shape} do not fit together")
    return dispatch.call("linear", LINEAR, implementation, x, weight, out_dtype=out_dtype or x.dtype)
