"""What the Triton kernels of a recurrent layer's decode share: places of rows, and channels of a convolution."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton_blocks import load_if

F32 = jnp.float32


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

    Inputs and taps are blocks [n, count], oldest first; n is the next power of two of the width. As one vector for each
    tap, the fewer channels than threads would be loaded and convolved anew for each layout that they are needed in, by
    Triton's rules.
    """

    def __init__(self, windows, first, projected, count, dtype, weight=None, bias=None, ring=None):
        """`first`: their index in windows, ring and taps; `projected`: in the projections' outputs."""
        self.windows, self.ring, self.dtype, self.keep = windows, ring, dtype, windows.shape[1]
        channel, tap = (jnp.arange(n, dtype=jnp.int32) for n in (count, pl.next_power_of_2(self.keep + 1)))
        shape = tap.size, count
        self.tap = jnp.broadcast_to(tap[:, None], shape)
        self.here, self.projected = (jnp.broadcast_to(n + channel[None, :], shape) for n in (first, projected))
        self.bias = 0 if bias is None else plt.load(bias.at[pl.ds(first, count)]).astype(F32)
        if weight is not None:
            taps = masked(weight.at[self.here, jnp.minimum(self.tap, self.keep)], self.tap <= self.keep)
            self.taps = taps.astype(F32)

    def inputs(self, projected, row, place, t):
        """Returns the inputs of step t's convolution as windows hold them; zeros for padding, which may hold NaN.

        They are loaded for all steps before any is written, because a row may write the slot that it reads.
        """
        at = t - self.keep + self.tap  # steps; negative ones are in the slot's window or in the row's tail
        last = projected.shape[1] - 1
        step = jnp.clip(at, 0, last)
        new = (at >= 0) & (at <= t) & place.live(step)
        value = masked(projected.at[row, step, self.projected], new).astype(self.dtype).astype(self.windows.dtype)
        index = at + self.keep
        if self.ring is not None:
            # The window in the slot is that of the anchor, and moves forward by the inputs since.
            index += place.start - place.first
            in_tail = (at < 0) & (index >= self.keep) & (place.count > 0)
            tail = masked(self.ring.at[place.tail, place.entry(self.ring, at), self.here], in_tail)
            value = jnp.where(in_tail, tail.astype(value.dtype), value)
        older = (at < 0) & (index < self.keep) & (place.source > 0)
        window = masked(self.windows.at[place.source, jnp.clip(index, 0, self.keep - 1), self.here], older)
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


def masked(ref, inside):
    """Loads a block of any shape; zeros without an access where `inside` is false."""
    return load_if(inside, ref, *inside.shape)
