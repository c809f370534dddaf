"""The gated RMS norm.

    gate first (all known models): norm(y * silu(z)) * weight
    norm_before_gate:              norm(y) * weight * silu(z)
    without a norm (`gated`):      y * silu(z)

with the sigmoid of z in place of its silu where that is asked for, and where norm divides each of `groups` equal pieces
of the channels by sqrt(mean of squares + eps). Sources: the Mamba2 block (Dao and Gu, 2024); with the sigmoid, "Kimi
Linear" (Kimi Team, 2025).
"""

from typing import Literal

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.fixed_order import F32, silu
from kernels_pallas.gated_norm import xla
from kernels_pallas.shape_check import check_groups, shapes_checked

NORM = (dispatch.Implementation("xla", xla.gated_rms_norm),)


@shapes_checked
def gated(y: Float[Array, "*batch channels"], z: Float[Array, "*batch channels"]) -> Float[Array, "*batch channels"]:
    """y * silu(z), computed in float32; the result is in y's dtype. Differentiable."""
    return (y.astype(F32) * silu(z.astype(F32))).astype(y.dtype)


@shapes_checked
def gated_rms_norm(
    y: Float[Array, "*batch channels"],
    z: Float[Array, "*batch channels"],
    weight: Float[Array, " channels"],
    *,
    groups: int,
    eps: float,
    norm_before_gate: bool = False,
    activation: Literal["silu", "sigmoid"] = "silu",
    implementation: str | None = None,
) -> Float[Array, "*batch channels"]:
    """Gates y by z and normalizes each group of channels, in float32; the result is in y's dtype. Differentiable."""
    check_groups("gated_rms_norm", y.shape[-1], groups)
    return dispatch.call(
        "gated_rms_norm", NORM, implementation, y, z, weight, groups=groups, eps=eps,
        norm_before_gate=norm_before_gate, activation=activation,
    )  # fmt: skip
