"""The causal convolution. Per channel, over the last `width` inputs of the row:

    y_t = activation(bias + sum_i weight[i] * x_{t - (width - 1) + i})

The activation is SiLU, or none; another one raises ValueError. Sums are float32, and y is in x's dtype. Inputs before a
row's first token are zeros. A slot of a store [slots, width-1, channels] keeps the *window*: a row's last width-1 raw
inputs, oldest first. The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot
that another row reads or writes. Donate stores and rings: they are updated in place. Source: the Mamba2 block (Dao and
Gu, 2024).
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.causal_conv1d import native, xla
from kernels_pallas.places import Anchored, Packed, Rows
from kernels_pallas.shape_check import shapes_checked
from kernels_pallas.tails import append, read_ring
from kernels_pallas.windows import read_windows, write_windows

Taps = Float[Array, "channels width"]
Bias = Float[Array, " channels"] | None
Windows = Float[Array, "slots width-1 channels"]
Ring = Float[Array, "tails entries channels"]
Steps = Float[Array, "rows steps channels"]

PREFILL = (
    dispatch.Implementation("native", native.causal_conv1d_prefill, native.unsupported, "cpu"),
    *fixed_order.implementations(native.causal_conv1d_prefill, xla.causal_conv1d_prefill),
    dispatch.Implementation("xla", xla.causal_conv1d_prefill),
)
UPDATE = (
    *fixed_order.implementations(native.causal_conv1d_update, xla.causal_conv1d_update),
    dispatch.Implementation("xla", xla.causal_conv1d_update),
)
SEQUENCE = (
    *fixed_order.implementations(native.causal_conv1d_sequence, xla.causal_conv1d_sequence),
    dispatch.Implementation("xla", xla.causal_conv1d_sequence),
)


@shapes_checked
def causal_conv1d_prefill(
    x: Float[Array, "tokens channels"], weight: Taps, bias: Bias, store: Windows, packed: Packed, *,
    activation: str | None = "silu", implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Windows]:  # fmt: skip
    """Convolves packed rows, each continuing from the window in its slot, and stores the windows at tile ends.

    Args:
        x: the rows' tokens one after the other. Those outside of all rows are padding: their y is meaningless, but
            finite inputs give finite outputs, and they change nothing else.
        packed: the window at each tile's end goes to `packed.tiles.write_slot`. A tile may be shorter than the window.
    Returns:
        y and the store.
    """
    return _call("causal_conv1d_prefill", PREFILL, implementation, activation, x, weight, bias, store, packed)


@shapes_checked
def causal_conv1d_update(
    x: Steps, weight: Taps, bias: Bias, store: Windows, rows: Rows, *, activation: str | None = "silu",
    implementation: str | None = None,
) -> tuple[Steps, Windows]:  # fmt: skip
    """Convolves a few steps per row, and writes the window after each. Returns y and the store."""
    return _call("causal_conv1d_update", UPDATE, implementation, activation, x, weight, bias, store, rows)


@shapes_checked
def causal_conv1d_sequence(
    x: Float[Array, "batch length channels"], weight: Taps, bias: Bias, *, activation: str | None = "silu",
    implementation: str | None = None,
) -> Float[Array, "batch length channels"]:  # fmt: skip
    """Convolves whole sequences from their first token, without a store; differentiable."""
    return _call("causal_conv1d_sequence", SEQUENCE, implementation, activation, x, weight, bias)


@shapes_checked
def causal_conv1d_replay(
    x: Steps, weight: Taps, bias: Bias, store: Windows, ring: Ring, places: Anchored, *, activation: str | None = "silu"
) -> tuple[Steps, Windows, Ring]:
    """Convolves `num_tokens` new tokens of each row, and appends their inputs to its tail.

    The inputs before them are in the tail, back to the anchor, and before it in the window in the anchor's slot. Where
    the new tokens reach the next multiple of the interval, the window there goes to `write_slot`.

    Args:
        ring: token n of a row is at entry n % entries of its tail, for width - 1 + steps - 1 entries at least.
    Returns:
        y (meaningless for padding), the store and the ring.
    """
    keep, steps = store.shape[1], x.shape[1]
    if not x.size:
        return x, store, ring
    inputs = inputs_before(store, ring, places).astype(x.dtype)
    seen = jnp.concatenate([inputs, x], axis=1)
    y = causal_conv1d_sequence(seen, weight, bias, activation=activation)[:, keep:]
    # The window that is due; chosen by selects, as in `inputs_before`.
    ahead, window = places.boundary - places.length, seen[:, 1 : 1 + keep]
    for n in range(2, 1 + steps):
        window = jnp.where((ahead == n)[:, None, None], seen[:, n : n + keep], window)
    # One in every interval is due.
    store = write_windows(store, window, places.due_slot, share=min(1.0, steps / places.interval))
    return y, store, append([ring], [x], places)[0]


def inputs_before(
    store: Float[Array, "slots n channels"], ring: Ring, places: Anchored
) -> Float[Array, "rows n channels"]:
    """Returns the last n inputs before the new tokens."""
    count, passed = store.shape[1], places.length - places.anchor_length
    position = places.length[:, None] - count + jnp.arange(count)
    since = (position >= places.anchor_length[:, None])[..., None]
    held = older = read_windows(store, places.anchor_slot)
    # Inputs of the window move forward by the number of inputs since. Uses selects, because on a TPU the operand of
    # a gather would be in memory.
    for n in range(1, count):
        older = jnp.where((passed == n)[:, None, None], jnp.roll(held, -n, axis=1), older)
    return jnp.where(since, read_ring(ring, places.tail_id, position), older)


def _call(operation, table, name, activation, x, weight, bias, *store_and_places):
    if activation not in ("silu", None):
        raise ValueError(f"{operation}: activation is {activation!r}, expected 'silu' or None")
    if store_and_places and not x.size:
        return x, store_and_places[0]
    return dispatch.call(operation, table, name, x, weight, bias, *store_and_places, activation=activation)
