"""The operations between the projections of a gated delta net, for decode of rows that are held by anchors.

Those of `kernels_pallas.gated_delta_update`, with `kernels_pallas.delta_replay` in place of the update, and with
convolutions whose last inputs are in tails. On GPU they are two kernels.
"""

from typing import Unpack

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.delta_replay import DeltaTail
from kernels_pallas.gated_delta_replay import pallas_gpu, xla
from kernels_pallas.gated_delta_update import Gates
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.tails import Places

GATED_DELTA_REPLAY = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_delta_replay"),
    dispatch.Implementation("xla", xla.gated_delta_replay),
)


@shapes_checked
def gated_delta_replay(
    qk: Float[Array, "rows steps 2 groups state"],
    v: Float[Array, "rows steps inner"],
    z: Float[Array, "rows steps inner"],
    a: Float[Array, "rows steps decays"],
    b: Float[Array, "rows steps heads"],
    a_log: Float[Array, " heads"],
    dt_bias: Float[Array, " decays"],
    weight: Float[Array, "inner width"],
    weight_qk: Float[Array, "channels width"],
    norm: Float[Array, " head_dim"],
    store: Float[Array, "slots heads head_dim state"],
    tail: DeltaTail,
    windows: Float[Array, "slots width-1 inner"],
    ring: Float[Array, "tails ring_entries inner"],
    windows_qk: Float[Array, "slots width-1 channels"],
    ring_qk: Float[Array, "tails ring_entries channels"],
    *,
    gates: Gates,
    implementation: str | None = None,
    **places: Unpack[Places],
) -> tuple[
    Float[Array, "rows steps inner"],
    Float[Array, "slots heads head_dim state"],
    DeltaTail,
    Float[Array, "slots width-1 inner"],
    Float[Array, "tails ring_entries inner"],
    Float[Array, "slots width-1 channels"],
    Float[Array, "tails ring_entries channels"],
]:
    """Runs a few new tokens per row from its anchor and tail, as `delta_replay` does.

    Sums, states, gate and norm are computed in float32; v, q and k after the convolution, q and k of length 1, and y
    before the gate are rounded to v's dtype.

    Args:
        qk, ..., norm: as of `gated_delta_update`.
        store, tail: as of `delta_replay`. Donate them, windows and rings: they are updated in place.
        windows, windows_qk: of the two convolutions, in slots.
        ring, ring_qk: their inputs since the anchor, as `causal_conv1d_replay` has them.
        places: see `kernels_pallas.tails.Places`.
    Returns:
        The output in v's dtype, meaningless for padding; store, tail, and windows and ring of both convolutions.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_delta_replay", b.shape[2], qk.shape[3])
    return dispatch.call(
        "gated_delta_replay", GATED_DELTA_REPLAY, implementation, qk, v, z, a, b, a_log, dt_bias, weight, weight_qk,
        norm, store, DeltaTail(*tail), windows, ring, windows_qk, ring_qk, gates=gates, **places,
    )  # fmt: skip
