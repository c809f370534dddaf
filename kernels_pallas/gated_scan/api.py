"""The operations between the projections of a Mamba2 layer, for prefill.

    x = convolution(x)                       `kernels_pallas.causal_conv1d`
    y = scan(x, dt, a, b, c, d)              `kernels_pallas.ssd_scan`
    out = norm(y * silu(z)) * weight         `kernels_pallas.gated_norm`

Each of these reads and writes [tokens, inner]. As one operation, only z and x from the projection and the output are
stored in memory. Source: the Mamba2 block (Dao and Gu, 2024).
"""

from typing import TypedDict, Unpack

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.gated_scan import pallas_tpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked

GATED_SCAN = (
    *dispatch.kernels("tpu", pallas_tpu, "gated_scan"),
    dispatch.Implementation("xla", xla.gated_scan),
)


class Places(TypedDict):
    """The positions of the tokens of ragged rows: packed one after the other from the first on, and divided into tiles.

    A row's tiles are consecutive, and so are the tokens of a row's tiles.
    """

    token_row: Int[Array, " tokens"]
    """The row of each token; any for padding."""
    token_in_tiles: Int[Array, " tokens"]
    """Where each token is in the flattened tiles; any place for padding."""
    row_start: Int[Array, " rows"]
    """Index of each row's first token."""
    read_slot: Int[Array, " rows"]
    """0 reads as zeros."""
    tile_row: Int[Array, " tiles"]
    tile_first: Bool[Array, " tiles"]
    """The tile is its row's first, or padding."""
    tile_end: Int[Array, " tiles"]
    """How many of the row's tokens lie up to the tile's end."""
    tile_read_slot: Int[Array, " tiles"]
    """That of the row at its first tile."""
    tile_write_slot: Int[Array, " tiles"]
    """Where state and window at the tile's end go; 0: nowhere."""
    tile_tokens: Int[Array, "tiles tile_size"]
    """Indices of the tiles' tokens; any for padding."""
    tile_valid: Bool[Array, "tiles tile_size"]
    """Which of them are tokens: those in front."""


@shapes_checked
def gated_scan(
    zx: Float[Array, "tokens 2 inner"],
    dt: Float[Array, "tokens heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tokens groups state"],
    c: Float[Array, "tokens groups state"],
    d: Float[Array, " heads"],
    weight: Float[Array, "inner width"],
    bias: Float[Array, " inner"] | None,
    norm: Float[Array, " inner"] | None,
    store: Float[Array, "slots heads head_dim state"],
    windows: Float[Array, "slots width-1 inner"],
    *,
    eps: float,
    norm_before_gate: bool = False,
    implementation: str | None = None,
    **places: Unpack[Places],
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
        dt: step sizes after softplus; never 0 for a token.
        a: -exp(A_log).
        b: convolved already, as is c.
        d: the skip weight.
        weight, bias: of the convolution.
        norm: the norm's weight; None: gate only.
        store, windows: states, and inputs of the convolution, oldest first. Donate them: they are updated in place.
    Returns:
        The output in zx's dtype (of padding it is meaningless but finite), and both stores.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("gated_scan", dt.shape[1], b.shape[1])
    return dispatch.call(
        "gated_scan", GATED_SCAN, implementation, zx, dt, a, b, c, d, weight, bias, norm, store, windows,
        eps=eps, norm_before_gate=norm_before_gate, **places,
    )  # fmt: skip
