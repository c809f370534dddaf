"""The operations between the projections of a Mamba2 layer, for decode of rows that are held by anchors.

Those of `kernels_pallas.gated_update`, with `kernels_pallas.state_replay` in place of the update, and with convolutions
whose last inputs are in tails. On GPU they are two kernels.
"""

from typing import Unpack

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.gated_replay import pallas_gpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.state_replay import Tail
from kernels_pallas.tails import Places

GATED_REPLAY = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_replay"),
    dispatch.Implementation("xla", xla.gated_replay),
)


@shapes_checked
def gated_replay(
    zx: Float[Array, "rows steps 2 inner"],
    bc: Float[Array, "rows steps 2 groups state"],
    dt: Float[Array, "rows steps heads"],
    a_log: Float[Array, " heads"],
    d: Float[Array, " heads"],
    dt_bias: Float[Array, " heads"],
    weight: Float[Array, "inner width"],
    bias: Float[Array, " inner"] | None,
    weight_bc: Float[Array, "channels width"],
    bias_bc: Float[Array, " channels"] | None,
    norm: Float[Array, " inner"] | None,
    store: Float[Array, "slots heads head_dim state"],
    tail: Tail,
    windows: Float[Array, "slots width-1 inner"],
    ring: Float[Array, "tails ring_entries inner"],
    windows_bc: Float[Array, "slots width-1 channels"],
    ring_bc: Float[Array, "tails ring_entries channels"],
    *,
    dt_limit: tuple[float, float],
    eps: float,
    norm_before_gate: bool = False,
    implementation: str | None = None,
    **places: Unpack[Places],
) -> tuple[
    Float[Array, "rows steps inner"],
    Float[Array, "slots heads head_dim state"],
    Tail,
    Float[Array, "slots width-1 inner"],
    Float[Array, "tails ring_entries inner"],
    Float[Array, "slots width-1 channels"],
    Float[Array, "tails ring_entries channels"],
]:
    """Runs a few new tokens per row from its anchor and tail, as `state_replay` does.

    Sums, states, gate and norm are computed in float32; x, b and c after the convolution are rounded to zx's dtype, and
    so is y before the gate.

    Args:
        zx, ..., norm: as of `gated_update`.
        store, tail: as of `state_replay`. Donate them, windows and rings: they are updated in place.
        windows, windows_bc: of the two convolutions, in slots.
        ring, ring_bc: their inputs since the anchor, as `causal_conv1d_replay` has them.
        dt_limit: bounds of the step size, of which the lower one is above 0.
        places: see `kernels_pallas.tails.Places`.
    Returns:
        The output in zx's dtype, meaningless for padding; store, tail, and windows and ring of both convolutions.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_replay", dt.shape[2], bc.shape[3])
    return dispatch.call(
        "gated_replay", GATED_REPLAY, implementation, zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc,
        norm, store, Tail(*tail), windows, ring, windows_bc, ring_bc, dt_limit=dt_limit, eps=eps,
        norm_before_gate=norm_before_gate, **places,
    )  # fmt: skip
