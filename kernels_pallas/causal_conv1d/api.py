"""The causal convolution. Per channel, over the last `width` inputs of the row:

    y_t = activation(bias + sum_i weight[i] * x_{t - (width - 1) + i})

The activation is SiLU, or none. Inputs before a row's first token are zeros. A slot keeps the *window*: a row's last
width-1 raw inputs, oldest first.
Source: the Mamba2 block (Dao and Gu, 2024).
"""

from jaxtyping import Array, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.causal_conv1d import native, xla
from kernels_pallas.places import Packed, Rows
from kernels_pallas.shape_check import shapes_checked

PREFILL = (
    dispatch.Implementation("native", native.causal_conv1d_prefill, native.unsupported, "cpu"),
    fixed_order.implementation(native.causal_conv1d_prefill),
    dispatch.Implementation("xla", xla.causal_conv1d_prefill),
)
UPDATE = (
    fixed_order.implementation(native.causal_conv1d_update),
    dispatch.Implementation("xla", xla.causal_conv1d_update),
)
SEQUENCE = (
    fixed_order.implementation(native.causal_conv1d_sequence),
    dispatch.Implementation("xla", xla.causal_conv1d_sequence),
)


@shapes_checked
def causal_conv1d_prefill(
    x: Float[Array, "tokens channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    store: Float[Array, "slots width-1 channels"],
    packed: Packed,
    *,
    activation: str | None = "silu",
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens channels"], Float[Array, "slots width-1 channels"]]:
    """Convolves packed rows, each continuing from the window in its slot, and stores the windows at tile ends.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. The sums are float32.

    Args:
        x: the rows' tokens one after the other. Those outside of all rows are padding: their y is meaningless, but
            finite inputs give finite outputs, and they change nothing else.
        store: windows, [slots, width-1, channels]. Donate it: it is updated in place.
        packed: the window at each tile's end goes to `packed.tiles.write_slot`. A tile may be shorter than the window.
    Returns:
        y in x's dtype, and the store.
    Raises:
        ValueError: an unknown activation.
    """
    return _call("causal_conv1d_prefill", PREFILL, implementation, activation, x, weight, bias, store, packed)


@shapes_checked
def causal_conv1d_update(
    x: Float[Array, "rows steps channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    store: Float[Array, "slots width-1 channels"],
    rows: Rows,
    *,
    activation: str | None = "silu",
    implementation: str | None = None,
) -> tuple[Float[Array, "rows steps channels"], Float[Array, "slots width-1 channels"]]:
    """Convolves a few steps per row, and writes the window after each.

    The rules of `kernels_pallas.slots` apply: a row may write the slot that it reads, and no slot that another row
    reads or writes. The sums are float32.

    Args:
        store: windows, [slots, width-1, channels]. Donate it: it is updated in place.
    Returns:
        y in x's dtype, and the store.
    Raises:
        ValueError: an unknown activation.
    """
    return _call("causal_conv1d_update", UPDATE, implementation, activation, x, weight, bias, store, rows)


@shapes_checked
def causal_conv1d_sequence(
    x: Float[Array, "batch length channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    *,
    activation: str | None = "silu",
    implementation: str | None = None,
) -> Float[Array, "batch length channels"]:
    """Convolves whole sequences from their first token, without a store; differentiable. y is in x's dtype.

    Raises:
        ValueError: an unknown activation.
    """
    return _call("causal_conv1d_sequence", SEQUENCE, implementation, activation, x, weight, bias)


def _call(operation, table, name, activation, x, weight, bias, *store_and_places):
    if activation not in ("silu", None):
        raise ValueError(f"{operation}: activation is {activation!r}, expected 'silu' or None")
    if store_and_places and not x.size:
        return x, store_and_places[0]
    return dispatch.call(operation, table, name, x, weight, bias, *store_and_places, activation=activation)
