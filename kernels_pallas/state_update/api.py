"""The state update: the recurrence of `kernels_pallas.ssd_scan`, step by step (Dao and Gu, 2024)."""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.state_update import native, pallas_gpu, pallas_tpu, xla

UPDATE = (
    *dispatch.kernels("tpu", pallas_tpu, "state_update"),
    *dispatch.kernels("gpu", pallas_gpu, "state_update"),
    dispatch.Implementation("native", native.state_update, native.unsupported, "cpu"),
    dispatch.Implementation("xla", xla.state_update),
    dispatch.Implementation("xla_row_blocks", xla.row_blocks),
    dispatch.Implementation("xla_all_rows", xla.all_rows),
)


@shapes_checked
def state_update(
    x: Float[Array, "rows steps heads head_dim"],
    dt: Float[Array, "rows steps heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows steps groups state"],
    c: Float[Array, "rows steps groups state"],
    d: Float[Array, " heads"],
    store: Float[Array, "slots heads head_dim state"],
    *,
    read_slot: Int[Array, " rows"],
    write_slot: Int[Array, "rows steps"],
    implementation: str | None = None,
) -> tuple[Float[Array, "rows steps heads head_dim"], Float[Array, "slots heads head_dim state"]]:
    """Runs `steps` recurrent steps per row from `read_slot`, and writes the state after step t to `write_slot[:, t]`.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. State mathematics is float32; after each step the state is rounded to the store's dtype, so that
    several steps in one call equal one step in each of several calls. A token's y may be read before this rounding.

    Args:
        x: any float dtype; so are b and c.
        dt: step sizes after softplus. A step with dt = 0 in all heads is padding: it leaves the state bitwise as it was
            even where x, b or c hold NaN, and its y is 0.
        a: -exp(A_log).
        d: the skip weight.
        store: float32 or bfloat16. Donate it: it is updated in place.
    Returns:
        y in x's dtype, and the store.
    Raises:
        ValueError: the shapes do not match.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    check_groups("state_update", x.shape[2], b.shape[2])
    return dispatch.call(
        "state_update", UPDATE, implementation, x, dt, a, b, c, d, store, read_slot=read_slot, write_slot=write_slot
    )
