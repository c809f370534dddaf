"""The selective scan. For each token t of a row, for channel i and entry n of the channel's state:

    h_t[n, i] = exp(dt_t[i] * a[n, i]) * h_{t-1}[n, i] + dt_t[i] * x_t[i] * b_t[n]
    y_t[i]    = sum over n of h_t[n, i] * c_t[n] + d[i] * x_t[i]

Source: "Mamba" (Gu and Dao, 2023), algorithm 2. Each number of a state has a decay of its own, so that the scan is no
matrix product. A state is stored as [state, inner]: a TPU pads the last axis to 128 numbers, and `state` is usually 16.

A token with dt = 0 is padding, in all channels at once: no other token has a step size of 0. Whatever x, b and c of
padding hold (NaN included), it leaves the state bitwise as it was, and its y is 0.

In all forms x, b and c are of any float dtype, dt are step sizes after softplus, a is -exp(A_log), transposed, and d is
the skip weight. State mathematics is float32. Slots, tails and precision are those of `kernels_pallas.recurrence`:
stores are float32 or bfloat16. Donate them and tails: they are updated in place.
"""

from typing import NamedTuple

from jaxtyping import Array, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.places import Anchored, Rows, Tiles
from kernels_pallas.selective_scan import native, pallas_gpu, pallas_tpu, xla
from kernels_pallas.shape_check import shapes_checked
from kernels_pallas.tails import check_tail

SCAN = (
    fixed_order.implementation(native.selective_scan),
    *dispatch.kernels("tpu", pallas_tpu, "selective_scan"),
    *dispatch.kernels("gpu", pallas_gpu, "selective_scan"),
    dispatch.Implementation("xla", xla.selective_scan),
)
SEQUENCE = (
    fixed_order.implementation(native.selective_scan_sequence),
    dispatch.Implementation("xla", xla.selective_scan_sequence),
)
UPDATE = (
    fixed_order.implementation(native.selective_update),
    *dispatch.kernels("tpu", pallas_tpu, "selective_update"),
    *dispatch.kernels("gpu", pallas_gpu, "selective_update"),
    dispatch.Implementation("xla", xla.selective_update),
)
REPLAY = (dispatch.Implementation("xla", xla.selective_replay),)


class SelectiveTail(NamedTuple):
    """The tails of one layer: rings of inputs. A row's token n is at entry n % L. SelectiveTail 0 belongs to no row."""

    x: Float[Array, "tails entries inner"]
    b: Float[Array, "tails entries state"]
    dt: Float[Array, "tails entries inner"]
    """float32, after softplus."""


@shapes_checked
def selective_scan(
    x: Float[Array, "tiles tile_size inner"],
    dt: Float[Array, "tiles tile_size inner"],
    a: Float[Array, "state inner"],
    b: Float[Array, "tiles tile_size state"],
    c: Float[Array, "tiles tile_size state"],
    d: Float[Array, " inner"],
    store: Float[Array, "slots state inner"],
    tiles: Tiles,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "tiles tile_size inner"], Float[Array, "slots state inner"]]:
    """Scans rows cut into tiles, from states in the store to states in the store.

    Returns:
        y in x's dtype, and the store.
    """
    return dispatch.call("selective_scan", SCAN, implementation, x, dt, a, b, c, d, store, tiles)


@shapes_checked
def selective_scan_sequence(
    x: Float[Array, "batch length inner"],
    dt: Float[Array, "batch length inner"],
    a: Float[Array, "state inner"],
    b: Float[Array, "batch length state"],
    c: Float[Array, "batch length state"],
    d: Float[Array, " inner"],
    *,
    initial_state: Float[Array, "batch state inner"] | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch length inner"], Float[Array, "batch state inner"]]:
    """Scans whole sequences of any length, without a store; differentiable in every float argument.

    Args:
        initial_state: zeros if None.
    Returns:
        y in x's dtype, and the final state in float32.
    """
    return dispatch.call(
        "selective_scan_sequence", SEQUENCE, implementation, x, dt, a, b, c, d, initial_state=initial_state
    )


@shapes_checked
def selective_update(
    x: Float[Array, "rows steps inner"],
    dt: Float[Array, "rows steps inner"],
    a: Float[Array, "state inner"],
    b: Float[Array, "rows steps state"],
    c: Float[Array, "rows steps state"],
    d: Float[Array, " inner"],
    store: Float[Array, "slots state inner"],
    rows: Rows,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows steps inner"], Float[Array, "slots state inner"]]:
    """Runs `steps` recurrent steps per row, and writes the state after each.

    Returns:
        y in x's dtype, and the store.
    """
    return dispatch.call("selective_update", UPDATE, implementation, x, dt, a, b, c, d, store, rows)


@shapes_checked
def selective_replay(
    x: Float[Array, "rows steps inner"],
    dt: Float[Array, "rows steps inner"],
    a: Float[Array, "state inner"],
    b: Float[Array, "rows steps state"],
    c: Float[Array, "rows steps state"],
    d: Float[Array, " inner"],
    states: Float[Array, "slots state inner"],
    tail: SelectiveTail,
    places: Anchored,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "rows steps inner"], Float[Array, "slots state inner"], SelectiveTail]:
    """y of `num_tokens` new tokens of each row, from S(anchor_length) and the tail's inputs since then.

    The tail of a channel is its x and its step size: a decay depends on the channel and on the entry of its state, and
    is computed from the step size and `a`.

    Returns:
        y in x's dtype, states and tail.
    Raises:
        ValueError: an impossible interval or number of entries.
    """
    (_, steps, inner), state = x.shape, b.shape[2]
    tail = SelectiveTail(*tail)
    channels = {"x": inner, "b": state, "dt": inner}
    check_tail("selective_replay", tail._asdict(), channels, interval=places.interval, steps=steps)
    return dispatch.call("selective_replay", REPLAY, implementation, x, dt, a, b, c, d, states, tail, places)
