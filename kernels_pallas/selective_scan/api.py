"""The selective scan. For each token t of a row, for channel i and entry n of the channel's state:

    h_t[n, i] = exp(dt_t[i] * a[n, i]) * h_{t-1}[n, i] + dt_t[i] * x_t[i] * b_t[n]
    y_t[i]    = sum over n of h_t[n, i] * c_t[n] + d[i] * x_t[i]

Source: "Mamba" (Gu and Dao, 2023), algorithm 2. Each number of a state has a decay of its own, so that the scan is no
matrix product. A state is stored as [state, inner]: a TPU pads the last axis to 128 numbers, and `state` is usually 16.

A token with dt = 0 is padding, in all channels at once: no other token has a step size of 0. Whatever x, b and c of
padding hold (NaN included), it leaves the state bitwise as it was, and its y is 0.

In all forms a is -exp(A_log), transposed, d is the skip weight, and y is in x's dtype. State mathematics is float32.
Slots, tails and precision are those of `kernels_pallas.recurrence`: stores are float32 or bfloat16. Donate them and
tails: they are updated in place.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.places import Anchored, Rows, Tiles
from kernels_pallas.selective_scan import native, pallas_gpu, pallas_tpu, xla
from kernels_pallas.selective_scan.entry import SelectiveEntry, SelectiveTail
from kernels_pallas.shape_check import check_shapes, shapes_checked
from kernels_pallas.tails import check_tail

States = Float[Array, "slots state inner"]
Outputs = Float[Array, "rows steps inner"]
Rates = Float[Array, "state inner"]
Skip = Float[Array, " inner"]

SCAN = (
    *fixed_order.implementations(native.selective_scan, None),
    *dispatch.kernels("tpu", pallas_tpu, "selective_scan"),
    *dispatch.kernels("gpu", pallas_gpu, "selective_scan"),
    dispatch.Implementation("xla", xla.selective_scan),
)
SEQUENCE = (
    *fixed_order.implementations(native.selective_scan_sequence, None),
    dispatch.Implementation("xla", xla.selective_scan_sequence),
)
UPDATE = (
    *fixed_order.implementations(native.selective_update, None),
    *dispatch.kernels("tpu", pallas_tpu, "selective_update"),
    *dispatch.kernels("gpu", pallas_gpu, "selective_update"),
    dispatch.Implementation("xla", xla.selective_update),
)
REPLAY = (dispatch.Implementation("xla", xla.selective_replay),)


@shapes_checked
def selective_scan(
    entry: SelectiveEntry, store: States, tiles: Tiles, *, a: Rates, d: Skip, implementation: str | None = None
) -> tuple[Outputs, States]:
    """Scans rows cut into tiles, from states in the store to states in the store. The entry is [tiles, tile_size, ...].

    Returns y and the store.
    """
    check_shapes("selective_scan", first=(tiles.first, "tiles"), dt=(entry.dt, "tiles tile_size inner"))
    return dispatch.call("selective_scan", SCAN, implementation, entry, store, tiles, a=a, d=d)


@shapes_checked
def selective_scan_sequence(
    entry: SelectiveEntry, *, a: Rates, d: Skip, initial_state: Float[Array, "rows state inner"] | None = None,
    implementation: str | None = None,
) -> tuple[Outputs, Float[Array, "rows state inner"]]:  # fmt: skip
    """Scans whole sequences of any length, without a store; differentiable in every float argument.

    Args:
        initial_state: zeros if None.
    Returns:
        y, and the final state in float32.
    """
    if initial_state is None:
        initial_state = jnp.zeros((len(entry.x), *a.shape), jnp.float32)
    options = {"a": a, "d": d, "initial_state": initial_state}
    return dispatch.call("selective_scan_sequence", SEQUENCE, implementation, entry, **options)


@shapes_checked
def selective_update(
    entry: SelectiveEntry, store: States, rows: Rows, *, a: Rates, d: Skip, implementation: str | None = None
) -> tuple[Outputs, States]:
    """Runs `steps` recurrent steps per row, and writes the state after each. Returns y and the store."""
    return dispatch.call("selective_update", UPDATE, implementation, entry, store, rows, a=a, d=d)


@shapes_checked
def selective_replay(
    entry: SelectiveEntry, states: States, tail: SelectiveTail, places: Anchored, *, a: Rates, d: Skip,
    implementation: str | None = None,
) -> tuple[Outputs, States, SelectiveTail]:  # fmt: skip
    """y of `num_tokens` new tokens of each row, from S(anchor_length) and the tail's inputs since then.

    The tail of a channel is its x and its step size: a decay depends on the channel and on the entry of its state, and
    is computed from the step size and `a`. An impossible interval or number of entries raises ValueError.

    Returns:
        y, states and tail.
    """
    (_, steps, inner), state = entry.x.shape, entry.b.shape[2]
    channels = {"x": inner, "b": state, "dt": inner}
    check_tail("selective_replay", tail._asdict(), channels, interval=places.interval, steps=steps)
    return dispatch.call("selective_replay", REPLAY, implementation, entry, states, tail, places, a=a, d=d)
