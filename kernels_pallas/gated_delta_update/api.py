"""The operations between the projections of a gated delta net, for decode.

    v, q, k = convolution(v, q, k)                    `kernels_pallas.causal_conv1d`
    q, k = q / |q| / sqrt(size), k / |k|
    log_decay, beta = of a and b                      `kernels_pallas.gated_delta_update.gates`
    y = update(q, k, v, log_decay, beta)              `kernels_pallas.delta_update`
    out = norm(y) * weight * silu(z) of each head     `kernels_pallas.gated_norm`

As `kernels_pallas.gated_update`, this is two kernels on GPU. Sources: "Gated Delta Networks" (Yang, Kautz and
Hatamizadeh, 2024), "Kimi Linear" (Kimi Team, 2025).
"""

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.gated_delta_update import pallas_gpu, xla
from kernels_pallas.gated_delta_update.gates import Gates
from kernels_pallas.shape_check import check_groups, shapes_checked

GATED_DELTA_UPDATE = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_delta_update"),
    dispatch.Implementation("xla", xla.gated_delta_update),
)


@shapes_checked
def gated_delta_update(
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
    windows: Float[Array, "slots width-1 inner"],
    windows_qk: Float[Array, "slots width-1 channels"],
    *,
    valid: Bool[Array, "rows steps"],
    read_slot: Int[Array, " rows"],
    write_slot: Int[Array, "rows steps"],
    gates: Gates,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "rows steps inner"],
    Float[Array, "slots heads head_dim state"],
    Float[Array, "slots width-1 inner"],
    Float[Array, "slots width-1 channels"],
]:
    """Runs `steps` recurrent steps per row from `read_slot`; states and windows after step t go to `write_slot[:, t]`.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. Sums, states, gate and norm are computed in float32; v, q and k after the convolution, q and k of
    length 1, and y before the gate are rounded to v's dtype.

    Args:
        qk, v: the convolution's inputs, of the same dtype; z: the gate.
        a: float32, before bias and softplus: of each head, or of each channel of its keys. b: float32, before the
            sigmoid.
        weight, weight_qk: of the convolutions of v, and of q and k. Both have SiLU and no bias.
        norm: the norm's weight, the same for all heads.
        store: states, float32 or bfloat16. Donate it and the windows: they are updated in place.
        windows, windows_qk: inputs of the two convolutions, oldest first.
        valid: which steps are tokens: those in front. Others have `write_slot` 0, and their output is meaningless.
    Returns:
        The output in v's dtype, and the three stores.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_delta_update", b.shape[2], qk.shape[3])
    return dispatch.call(
        "gated_delta_update", GATED_DELTA_UPDATE, implementation, qk, v, z, a, b, a_log, dt_bias, weight, weight_qk,
        norm, store, windows, windows_qk, valid=valid, read_slot=read_slot, write_slot=write_slot, gates=gates,
    )  # fmt: skip
