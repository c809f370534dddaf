"""The operations between the projections of a Mamba2 layer, for decode.

    x, b, c = convolution(x, b, c)           `kernels_pallas.causal_conv1d`
    dt = clip(softplus(dt + dt_bias))
    y = update(x, dt, -exp(a_log), b, c, d)  `kernels_pallas.state_update`
    out = norm(y * silu(z)) * weight         `kernels_pallas.gated_norm`

At a few rows a GPU needs longer to launch these operations one by one than to run them; as one operation they are two
kernels. Source: the Mamba2 block (Dao and Gu, 2024). `kernels_pallas.gated_scan` is the same for prefill.
"""

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.gated_update import pallas_gpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked

GATED_UPDATE = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_update"),
    dispatch.Implementation("xla", xla.gated_update),
)


@shapes_checked
def step_sizes(
    dt: Float[Array, "*batch heads"], dt_bias: Float[Array, " heads"], dt_limit: tuple[float, float]
) -> Float[Array, "*batch heads"]:
    """softplus(dt + dt_bias), at least and at most `dt_limit`; all float32. Differentiable.

    Raises:
        ValueError: the shapes do not match.
    """
    return xla.step_sizes(dt, dt_bias, dt_limit)


@shapes_checked
def gated_update(
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
    windows: Float[Array, "slots width-1 inner"],
    windows_bc: Float[Array, "slots width-1 channels"],
    *,
    valid: Bool[Array, "rows steps"],
    read_slot: Int[Array, " rows"],
    write_slot: Int[Array, "rows steps"],
    dt_limit: tuple[float, float],
    eps: float,
    norm_before_gate: bool = False,
    implementation: str | None = None,
) -> tuple[
    Float[Array, "rows steps inner"],
    Float[Array, "slots heads head_dim state"],
    Float[Array, "slots width-1 inner"],
    Float[Array, "slots width-1 channels"],
]:
    """Runs `steps` recurrent steps per row from `read_slot`; states and windows after step t go to `write_slot[:, t]`.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. Sums, states, gate and norm are computed in float32; x, b and c after the convolution are rounded
    to zx's dtype, and so is y before the gate.

    Args:
        zx: the gate, and the convolution's input; bc: the convolution's input, of the same dtype.
        dt: float32, before bias and softplus.
        d: the skip weight.
        weight, bias: of the convolution of x; weight_bc, bias_bc: of that of B and C. Both have SiLU.
        norm: the norm's weight; None: gate only.
        store: states, float32 or bfloat16. Donate it and the windows: they are updated in place.
        windows, windows_bc: inputs of the two convolutions, oldest first.
        valid: which steps are tokens: those in front. Others have `write_slot` 0, and their output is meaningless.
        dt_limit: bounds of the step size, of which the lower one is above 0.
    Returns:
        The output in zx's dtype, and the three stores.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_update", dt.shape[2], bc.shape[3])
    return dispatch.call(
        "gated_update", GATED_UPDATE, implementation, zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc,
        norm, store, windows, windows_bc, valid=valid, read_slot=read_slot, write_slot=write_slot, dt_limit=dt_limit,
        eps=eps, norm_before_gate=norm_before_gate,
    )  # fmt: skip
