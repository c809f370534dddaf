"""The convolution of a few new tokens of rows that are held by anchors, in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas.causal_conv1d.api import causal_conv1d_sequence
from kernels_pallas.places import Anchored
from kernels_pallas.shape_check import shapes_checked
from kernels_pallas.tails import read_ring, write_ring
from kernels_pallas.windows import read_windows, write_windows


@shapes_checked
def causal_conv1d_replay(
    x: Float[Array, "rows steps channels"],
    weight: Float[Array, "channels width"],
    bias: Float[Array, " channels"] | None,
    store: Float[Array, "slots width-1 channels"],
    ring: Float[Array, "tails entries channels"],
    places: Anchored,
    *,
    activation: str | None = "silu",
) -> tuple[
    Float[Array, "rows steps channels"],
    Float[Array, "slots width-1 channels"],
    Float[Array, "tails entries channels"],
]:
    """Convolves `num_tokens` new tokens of each row, and appends their inputs to its tail.

    The inputs before them are in the tail, back to the anchor, and before it in the window in the anchor's slot. Where
    the new tokens reach the next multiple of the interval, the window there goes to `write_slot`.

    Args:
        store: windows. Donate it, and the ring: they are updated in place.
        ring: token n of a row is at entry n % entries of its tail, for width - 1 + steps - 1 entries at least.
    Returns:
        y in x's dtype (meaningless for padding), the store and the ring.
    Raises:
        ValueError: an unknown activation.
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
    step = jnp.arange(steps)
    position, valid = places.length[:, None] + step, step < places.num_tokens[:, None]
    return y, store, write_ring(ring, x, places.tail_id, position, valid)


def inputs_before(
    store: Float[Array, "slots n channels"],
    ring: Float[Array, "tails entries channels"],
    places: Anchored,
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
