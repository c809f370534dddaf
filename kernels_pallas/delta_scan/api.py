"""Public form of the scan by the gated delta rule. For each token t of a row, per head (of group g = head // (heads /
groups)):

    h_t = h_{t-1} * exp(log_decay_t)
    h_t = h_t + beta_t * (v_t - h_t . k_t[g]) (outer) k_t[g]
    y_t = h_t . q_t[g]

The state maps keys to values: what it has stored under k_t moves towards v_t by the share beta_t. Keys are expected to
have length 1 (at most), and beta to be at most 2: then the state is bounded. A decay is one number for each head, or
one for each channel of its keys.

Sources: "Gated Delta Networks" (Yang, Kautz and Hatamizadeh, 2024), section 3.3 for the chunked form; with decays by
channel, "Kimi Linear" (Kimi Team, 2025). A token with beta = 0 in all heads is padding: whatever its q, k, v and
log_decay hold (NaN included) it leaves the state bitwise as it was, and its y is 0.
"""

from jaxtyping import Array, Bool, Float, Int

from kernels_pallas import dispatch, invariant
from kernels_pallas.delta_scan import pallas_gpu, pallas_tpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked

SCAN = (
    *dispatch.kernels("tpu", pallas_tpu, "delta_scan"),
    *dispatch.kernels("gpu", pallas_gpu, "delta_scan"),
    invariant.scan(invariant.delta_scan, wide=True),
    invariant.implementation(invariant.delta_scan),
    dispatch.Implementation("xla", xla.delta_scan),
)
SEQUENCE = (
    invariant.implementation(invariant.delta_scan_sequence),
    dispatch.Implementation("xla", xla.delta_scan_sequence),
)


@shapes_checked
def delta_scan(
    q: Float[Array, "tiles tile_size groups state"],
    k: Float[Array, "tiles tile_size groups state"],
    v: Float[Array, "tiles tile_size heads head_dim"],
    log_decay: Float[Array, "tiles tile_size heads"] | Float[Array, "tiles tile_size heads state"],
    beta: Float[Array, "tiles tile_size heads"],
    store: Float[Array, "slots heads head_dim state"],
    *,
    tile_first: Bool[Array, " tiles"],
    read_slot: Int[Array, " tiles"],
    write_slot: Int[Array, " tiles"],
    implementation: str | None = None,
) -> tuple[Float[Array, "tiles tile_size heads head_dim"], Float[Array, "slots heads head_dim state"]]:
    """Scans rows cut into tiles, from states in the store to states in the store.

    Tiles and slots are those of `kernels_pallas.ssd_scan`: the tiles of a row are consecutive; one with `tile_first`
    starts from the state in `read_slot` (zeros for slot 0), any other continues from the previous tile. After a tile,
    the state goes to its `write_slot` (slot 0: nowhere). The rules of `kernels_pallas.slots` apply: a row may write the
    slot that it reads, and no slot that another row reads or writes. State mathematics is float32; at the end of each
    tile the state is rounded to the store's dtype, so that cutting a row between tiles into several calls changes
    nothing.

    Args:
        q: any float dtype; so are k and v.
        log_decay: at most 0; of each head, or of each channel of its keys.
        beta: 0 at padding.
        store: float32 or bfloat16. Donate it: it is updated in place.
    Returns:
        y in v's dtype, and the store.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("delta_scan", v.shape[2], q.shape[2])
    return dispatch.call(
        "delta_scan", SCAN, implementation, q, k, v, log_decay, beta, store,
        tile_first=tile_first, read_slot=read_slot, write_slot=write_slot,
    )  # fmt: skip


@shapes_checked
def delta_scan_sequence(
    q: Float[Array, "batch length groups state"],
    k: Float[Array, "batch length groups state"],
    v: Float[Array, "batch length heads head_dim"],
    log_decay: Float[Array, "batch length heads"] | Float[Array, "batch length heads state"],
    beta: Float[Array, "batch length heads"],
    *,
    initial_state: Float[Array, "batch heads head_dim state"] | None = None,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch length heads head_dim"], Float[Array, "batch heads head_dim state"]]:
    """Scans whole sequences of any length, without a store; differentiable in every float argument.

    Args:
        initial_state: zeros if None.
        chunk_size: a blocking choice; the result does not depend on it but for rounding.
    Returns:
        y in v's dtype, and the final state in float32.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("delta_scan_sequence", v.shape[2], q.shape[2])
    if chunk_size < 1:
        raise ValueError(f"delta_scan_sequence: chunk_size is {chunk_size}, expected at least 1")
    return dispatch.call(
        "delta_scan_sequence", SEQUENCE, implementation, q, k, v, log_decay, beta,
        initial_state=initial_state, chunk_size=chunk_size,
    )  # fmt: skip
