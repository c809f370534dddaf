"""Read and write windows: the slots of some rows in a store, without moving its other slots.

`kernels_pallas.slots` does this for any store. But windows are small, and all windows of a layer fit in a TPU's fast
memory, so the compiler would move all of them there, change a few, and move all of them back.
"""

from jaxtyping import Array, Float, Int

from kernels_pallas import dispatch
from kernels_pallas.shape_check import shapes_checked
from kernels_pallas.slots import read_slots, write_slots
from kernels_pallas.windows import pallas_tpu

READ = (*dispatch.kernels("tpu", pallas_tpu, "read_windows"), dispatch.Implementation("xla", read_slots))
WRITE = (
    *dispatch.kernels("tpu", pallas_tpu, "write_windows"),
    dispatch.Implementation("xla", lambda store, values, index, *, share: write_slots(store, values, index)),
)


@shapes_checked
def read_windows(
    store: Float[Array, "slots n channels"], index: Int[Array, " rows"], *, implementation: str | None = None
) -> Float[Array, "rows n channels"]:
    """Returns the windows at `index`; zeros where it is 0."""
    return dispatch.call("read_windows", READ, implementation, store, index)


@shapes_checked
def write_windows(
    store: Float[Array, "slots n channels"],
    values: Float[Array, "rows n channels"],
    index: Int[Array, " rows"],
    *,
    share: float = 1.0,
    implementation: str | None = None,
) -> Float[Array, "slots n channels"]:
    """The store with `values`, in its dtype, at `index`; those for index 0 are dropped. Other indices are distinct.

    Args:
        store: donate it: it is updated in place.
        share: average fraction of rows whose index is not 0; used only for estimates.
    """
    return dispatch.call("write_windows", WRITE, implementation, store, values, index, share=share)
