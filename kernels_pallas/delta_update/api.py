"""The delta update: the recurrence of `kernels_pallas.delta_scan`, step by step (Yang et al., 2024)."""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch, invariant
from kernels_pallas.delta_update import pallas_gpu, pallas_tpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked

UPDATE = (
    *dispatch.kernels("tpu", pallas_tpu, "delta_update"),
    *dispatch.kernels("gpu", pallas_gpu, "delta_update"),
    invariant.implementation(invariant.delta_update),
    dispatch.Implementation("xla", xla.delta_update),
    dispatch.Implementation("xla_row_blocks", xla.row_blocks),
    dispatch.Implementation("xla_all_rows", xla.all_rows),
)


@shapes_checked
def delta_update(
    q: Float[Array, "rows steps groups state"],
    k: Float[Array, "rows steps groups state"],
    v: Float[Array, "rows steps heads head_dim"],
    log_decay: Float[Array, "rows steps heads"] | Float[Array, "rows steps heads state"],
    beta: Float[Array, "rows steps heads"],
    store: Float[Array, "slots heads head_dim state"],
    *,
    read_slot: Int[Array, " rows"],
    write_slot: Int[Array, "rows steps"],
    implementation: str | None = None,
) -> tuple[Float[Array, "rows steps heads head_dim"], Float[Array, "slots heads head_dim state"]]:
    """Runs `steps` recurrent steps per row from `read_slot`, and writes the state after step t to `write_slot[:, t]`.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. State mathematics is float32; after each step the state is rounded to the store's dtype, so that
    several steps in one call equal one step in each of several calls.

    Args:
        q: any float dtype; so are k and v.
        log_decay: at most 0; of each head, or of each channel of its keys.
        beta: a step with beta = 0 in all heads is padding: it leaves the state bitwise as it was even where q, k, v or
            log_decay hold NaN, and its y is 0.
        store: float32 or bfloat16. Donate it: it is updated in place.
    Returns:
        y in v's dtype, and the store.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("delta_update", v.shape[2], q.shape[2])
    return dispatch.call(
        "delta_update", UPDATE, implementation, q, k, v, log_decay, beta, store,
        read_slot=read_slot, write_slot=write_slot,
    )  # fmt: skip
