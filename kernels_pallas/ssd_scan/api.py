"""The scan. For each token t of a row, per head (group g = head // (heads / groups)):

    h_t = exp(dt_t * a) * h_{t-1} + dt_t * x_t (outer) b_t[g]
    y_t = h_t . c_t[g] + d * x_t

Source: "Transformers are SSMs" (Dao and Gu, 2024), section 6 for the chunked form. A token with dt = 0 in all heads is
padding: whatever its x, b and c hold (NaN included) it leaves the state bitwise as it was, and its y is 0.
"""

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch, invariant
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.ssd_scan import pallas_gpu, pallas_tpu, xla

SCAN = (
    *dispatch.kernels("tpu", pallas_tpu, "ssd_scan"),
    *dispatch.kernels("gpu", pallas_gpu, "ssd_scan"),
    invariant.scan(invariant.ssd_scan),
    invariant.implementation(invariant.ssd_scan),
    dispatch.Implementation("xla", xla.ssd_scan),
    dispatch.Implementation("xla_whole_tiles", xla.whole_tiles),
)
SEQUENCE = (
    invariant.implementation(invariant.ssd_scan_sequence),
    dispatch.Implementation("xla", xla.ssd_scan_sequence),
)


@shapes_checked
def ssd_scan(
    x: Float[Array, "tiles tile_size heads head_dim"],
    dt: Float[Array, "tiles tile_size heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "tiles tile_size groups state"],
    c: Float[Array, "tiles tile_size groups state"],
    d: Float[Array, " heads"],
    store: Float[Array, "slots heads head_dim state"],
    *,
    tile_first: Bool[Array, " tiles"],
    read_slot: Int[Array, " tiles"],
    write_slot: Int[Array, " tiles"],
    implementation: str | None = None,
) -> tuple[Float[Array, "tiles tile_size heads head_dim"], Float[Array, "slots heads head_dim state"]]:
    """Scans rows cut into tiles, from states in the store to states in the store.

    The tiles of a row are consecutive. A tile with `tile_first` starts from the state in `read_slot` (zeros for slot
    0); any other continues from the previous tile. After a tile the state goes to its `write_slot` (slot 0: nowhere).
    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. State mathematics is float32; at the end of each tile the state is rounded to the store's dtype, so
    that cutting a row between tiles into several calls changes nothing.

    Args:
        x: any float dtype; so are b and c.
        dt: step sizes after softplus, 0 at padding.
        a: -exp(A_log).
        d: the skip weight.
        store: float32 or bfloat16. Donate it: it is updated in place.
    Returns:
        y in x's dtype, and the store.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("ssd_scan", x.shape[2], b.shape[2])
    return dispatch.call(
        "ssd_scan", SCAN, implementation, x, dt, a, b, c, d, store,
        tile_first=tile_first, read_slot=read_slot, write_slot=write_slot,
    )  # fmt: skip


@shapes_checked
def ssd_scan_sequence(
    x: Float[Array, "batch length heads head_dim"],
    dt: Float[Array, "batch length heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "batch length groups state"],
    c: Float[Array, "batch length groups state"],
    d: Float[Array, " heads"],
    *,
    initial_state: Float[Array, "batch heads head_dim state"] | None = None,
    chunk_size: int = 128,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch length heads head_dim"], Float[Array, "batch heads head_dim state"]]:
    """Scans whole sequences of any length, without a store; differentiable in every float argument.

    Args:
        initial_state: zeros if None.
        chunk_size: a blocking choice; the result does not depend on it but for rounding.
    Returns:
        y in x's dtype, and the final state in float32.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("ssd_scan_sequence", x.shape[2], b.shape[2])
    if chunk_size < 1:
        raise ValueError(f"ssd_scan_sequence: chunk_size is {chunk_size}, expected at least 1")
    return dispatch.call(
        "ssd_scan_sequence", SEQUENCE, implementation, x, dt, a, b, c, d,
        initial_state=initial_state, chunk_size=chunk_size,
    )  # fmt: skip
