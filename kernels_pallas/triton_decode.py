"""What the Triton kernels of a recurrent layer's decode share: channels of a convolution, and the gated norm after it.

A layer's first kernel convolves and updates or replays the states (`kernels_pallas.gated_recurrence`). The second one
is here. It writes the windows, and the inputs in tails, that programs of several
heads read in the first one.

Both read one array with all of the projections' outputs: XLA writes it as one kernel, or not at all where the merged
product already has it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from kernels_pallas.triton_blocks import padded, pieces, update_call

F32 = jnp.float32
NUMBERS = 4096  # of a state in one program, at most: a thread holds 32 of them


class SlotRow:
    """A row that reads and writes slots, inside a kernel: where, and which of its steps are tokens."""

    def __init__(self, row, read_slot, write_slot, valid=None):
        self.source = plt.load(read_slot.at[row])
        self._row, self._write_slot, self._valid = row, write_slot, valid

    def live(self, t):
        """Whether step t is a token."""
        return plt.load(self._valid.at[self._row, t])

    def target(self, t):
        """The slot of the state after step t; 0: not stored."""
        return plt.load(self._write_slot.at[self._row, t])


class AnchoredRow:
    """A row that is held by an anchor, inside a kernel; made of `kernels_pallas.tails.row_numbers`."""

    def __init__(self, row, *numbers):
        loaded = [plt.load(one.at[row]) for one in numbers]
        self.source, self.tail, self.first, self.start, self.count, self.due_slot, self.due = loaded

    def live(self, t):
        """Whether step t is a token."""
        return t < self.count

    def target(self, t):
        """The slot of the state after step t; 0: not stored."""
        return jnp.where(self.start + t + 1 == self.due, self.due_slot, 0)

    def entry(self, ring, t):
        """The entry of step t in a ring; the steps before the new ones are negative."""
        return (self.start + t) & (ring.shape[1] - 1)


class Channels:
    """Some channels of a convolution, inside a kernel: where they are, and their taps.

    Inputs and taps are blocks [padded(width), count], oldest first. As one vector for each tap, the fewer channels than
    threads would be loaded and convolved anew for each layout that they are needed in, by Triton's rules.
    """

    def __init__(self, windows, first, projected, count, dtype, weight=None, bias=None, ring=None):
        """`first`: their index in windows, ring and taps; `projected`: in the projections' outputs."""
        self.windows, self.ring, self.dtype, self.keep = windows, ring, dtype, windows.shape[1]
        channel, tap = jnp.arange(count, dtype=jnp.int32), jnp.arange(padded(self.keep + 1), dtype=jnp.int32)
        shape = tap.size, count
        self.tap = jnp.broadcast_to(tap[:, None], shape)
        self.here, self.projected = (jnp.broadcast_to(n + channel[None, :], shape) for n in (first, projected))
        self.bias = 0 if bias is None else plt.load(bias.at[pl.ds(first, count)]).astype(F32)
        if weight is not None:
            self.taps = _load(weight.at[self.here, jnp.minimum(self.tap, self.keep)], self.tap <= self.keep)

    def inputs(self, projected, row, place, t):
        """Returns the inputs of step t's convolution as windows hold them; zeros for padding, which may hold NaN.

        They are loaded for all steps before any is written, because a row may write the slot that it reads.
        """
        at = t - self.keep + self.tap  # steps; negative ones are in the slot's window or in the row's tail
        last = projected.shape[1] - 1
        step = jnp.clip(at, 0, last)
        new = (at >= 0) & (at <= t) & place.live(step)
        value = _masked(projected.at[row, step, self.projected], new).astype(self.dtype).astype(self.windows.dtype)
        index = at + self.keep
        if self.ring is not None:
            # The window in the slot is that of the anchor, and moves forward by the inputs since.
            index += place.start - place.first
            in_tail = (at < 0) & (index >= self.keep) & (place.count > 0)
            tail = _masked(self.ring.at[place.tail, place.entry(self.ring, at), self.here], in_tail)
            value = jnp.where(in_tail, tail.astype(value.dtype), value)
        older = (at < 0) & (index < self.keep) & (place.source > 0)
        window = _masked(self.windows.at[place.source, jnp.clip(index, 0, self.keep - 1), self.here], older)
        return jnp.where(older, window, value)

    def convolved(self, inputs):
        """Returns silu(bias + the sum over taps), rounded to the dtype of activations, in float32."""
        total = jnp.sum(self.taps * inputs.astype(F32), axis=0) + self.bias
        return jax.nn.silu(total).astype(self.dtype).astype(F32)

    def write(self, place, t, inputs, windows, ring=None):
        """Writes the inputs up to step t as the window of its state, and the last one into the row's tail."""
        slot = place.target(t)
        kept = (slot > 0) & (self.tap > 0) & (self.tap <= self.keep)
        plt.store(windows.at[slot, jnp.clip(self.tap - 1, 0, self.keep - 1), self.here], inputs, mask=kept)
        if ring is not None:
            entry = jnp.broadcast_to(place.entry(ring, t), self.tap.shape)
            last = place.live(t) & (self.tap == self.keep)
            plt.store(ring.at[place.tail, entry, self.here], inputs.astype(ring.dtype), mask=last)


def indices(count: int) -> Any:
    """Yields 0..count-1 as the interpreter accepts them."""
    return map(jnp.int32, range(count))


def wait(interpret: bool) -> None:
    """Lets a program's threads wait for each other, so that none writes a window that another one has yet to load."""
    if not interpret:
        plt.debug_barrier()


def gate(
    places: tuple[Array, ...],
    projected: Float[Array, "rows steps outputs"],
    y: Float[Array, "rows steps inner"],
    norm: Float[Array, " size"] | None,
    windows: Float[Array, "slots n channels"],
    ring: Float[Array, "tails entries channels"] | None = None,
    *,
    groups: int,
    norms: int,
    eps: float,
    norm_before_gate: bool,
    sigmoid: bool = False,
    interpret: bool,
) -> Sequence[Array]:
    """Gates y, normalises it, and writes windows of a convolution in place: one program for each row and group.

    Args:
        places: arguments of `SlotRow`, or, with a ring, of `AnchoredRow`.
        projected: float32; gates at 0, the convolution's inputs at 2 * inner.
        norm: the norm's weight, for all channels or for each piece that is normalised; None: gate only.
        windows: of two parts (B and C, or queries and keys) by groups.
        ring: tails of inputs of the convolution.
        norms: pieces of a group that are normalised on their own.
        sigmoid: the gate is sigmoid(z) and not silu(z).
    Returns:
        The result, windows, and ring if there is one.
    """
    rows, _, inner = y.shape
    stores = (windows,) if ring is None else (windows, ring)
    body = functools.partial(
        _gate, stores=len(stores), groups=groups, norms=norms, eps=eps, norm_before_gate=norm_before_gate,
        sigmoid=sigmoid, normalised=norm is not None, interpret=interpret,
    )  # fmt: skip
    return update_call(
        body,
        "gated_norm",
        (rows, groups),
        (*places, projected, y, jnp.ones(1, y.dtype) if norm is None else norm),
        jax.ShapeDtypeStruct(y.shape, y.dtype),
        stores,
        interpret=interpret,
        warps=1 if inner // groups <= 256 else 4,
    )


def _gate(*refs, stores, groups, norms, eps, norm_before_gate, sigmoid, normalised, interpret):
    *places, projected, y, norm = refs[: -2 * stores - 1]
    windows_in, *ring_in = refs[-2 * stores - 1 : -stores - 1]
    out, *written = refs[-stores - 1 :]
    row, group = pl.program_id(0), pl.program_id(1)
    place = (AnchoredRow if ring_in else SlotRow)(row, *places)
    steps, inner, dtype, size = y.shape[1], y.shape[2], y.dtype, windows_in.shape[2] // (2 * groups)
    firsts = [(n * groups + group) * size + piece.start for n in range(2) for piece in pieces(size)]
    counts = [piece.size for piece in pieces(size)] * 2
    parts = [
        Channels(windows_in, n, 2 * inner + n, count, dtype, ring=ring_in[0] if ring_in else None)
        for n, count in zip(firsts, counts, strict=True)
    ]
    inputs = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, of_step in zip(indices(steps), inputs, strict=True):
        for part, one in zip(parts, of_step, strict=True):
            part.write(place, t, one, *written)
    of_norm = inner // groups // norms
    piece, index = (jnp.arange(padded(n), dtype=jnp.int32) for n in (norms, of_norm))
    inside = (piece < norms)[:, None] & (index < of_norm)[None, :]
    channel = group * (inner // groups) + piece[:, None] * of_norm + index[None, :]
    scale: Any = 1.0
    if normalised:
        scale = _load(norm.at[channel if norm.shape[0] == inner else jnp.where(inside, index[None, :], 0)], inside)

    def one_step(t, _):
        value = _load(y.at[row, t, channel], inside)
        z = _load(projected.at[row, t, channel], inside).astype(dtype).astype(F32)
        factor = jax.nn.sigmoid(z) if sigmoid else jax.nn.silu(z)
        value = value if norm_before_gate and normalised else value * factor
        if normalised:
            value = value * lax.rsqrt(jnp.sum(value * value, axis=1)[:, None] / of_norm + eps) * scale
            value = value * factor if norm_before_gate else value
        plt.store(out.at[row, t, channel], value.astype(dtype), mask=inside)
        return 0

    lax.fori_loop(0, steps, one_step, 0)


def _load(ref, inside):
    return _masked(ref, inside).astype(F32)


def _masked(ref, inside):
    """Loads a block of any shape; zeros without an access where `inside` is false."""
    return plt.load(ref, mask=inside, other=jnp.zeros((), ref.dtype))
