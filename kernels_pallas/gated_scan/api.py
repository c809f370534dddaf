"""The operations between the projections of a Mamba2 layer, for prefill.

    x = convolution(x)                       `kernels_pallas.causal_conv1d`
    y = scan(x, b, c)                        `kernels_pallas.recurrence`
    out = norm(y * silu(z)) * weight         `kernels_pallas.gated_norm`

Each of these reads and writes [tokens, inner]. As one operation, only z and x from the projection and the output are
stored in memory. Source: the Mamba2 block (Dao and Gu, 2024).
"""

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.gated_scan import pallas_tpu, xla
from kernels_pallas.places import Packed
from kernels_pallas.shape_check import check_groups, shapes_checked

GATED_SCAN = (
    *dispatch.kernels("tpu", pallas_tpu, "gated_scan"),
    dispatch.Implementation("xla", xla.gated_scan),
)


@shapes_checked
def gated_scan(
    zx: Float[Array, "tokens 2 inner"],
    query: Float[Array, "tokens groups state"],
    key: Float[Array, "tokens groups state"],
    log_decay: Float[Array, "tokens heads"],
    strength: Float[Array, "tokens heads"],
    skip: Float[Array, " heads"],
    weight: Float[Array, "inner width"],
    bias: Float[Array, " inner"] | None,
    norm: Float[Array, " inner"] | None,
    store: Float[Array, "slots heads head_dim state"],
    windows: Float[Array, "slots width-1 inner"],
    packed: Packed,
    *,
    eps: float,
    norm_before_gate: bool = False,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "tokens inner"],
    Float[Array, "slots heads head_dim state"],
    Float[Array, "slots width-1 inner"],
]:
    """Convolves x with SiLU, scans, gates by silu(z) and normalises by groups, from slots to slots.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. Sums, states, gate and norm are computed in float32; x after the convolution is rounded to zx's
    dtype.

    Args:
        zx: the gate, and the convolution's input. Padding may contain any finite values.
        query, ..., strength: as of `kernels_pallas.recurrence`, convolved already; the strength is never 0 for a token.
        skip: the weight of the direct path.
        weight, bias: of the convolution.
        norm: the norm's weight; None: gate only.
        store, windows: states, and inputs of the convolution, oldest first. Donate them: they are updated in place.
    Returns:
        The output in zx's dtype (of padding it is meaningless but finite), and both stores.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_scan", strength.shape[1], key.shape[1])
    return dispatch.call(
        "gated_scan", GATED_SCAN, implementation, zx, query, key, log_decay, strength, skip, weight, bias, norm,
        store, windows, packed, eps=eps, norm_before_gate=norm_before_gate,
    )  # fmt: skip
