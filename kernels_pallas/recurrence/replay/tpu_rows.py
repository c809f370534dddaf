"""Shared code of the TPU kernels of replays: each row's anchor passes through VMEM once, and its tail's valid entries.

The grid is (rows, blocks of heads). Prefetched slot numbers select the blocks of states that the pipeline fetches and
writes back, the next row's while it writes this one's; states and tails are input and output in one buffer. The
pipeline moves a block only when its number changes, so a row that needs none (no anchor, no state due, padding) selects
the block that is already in VMEM. Tails stay in HBM, of which the kernel copies what it needs (`tpu_tails`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike

from kernels_pallas import tpu_pipeline
from kernels_pallas.places import Anchored
from kernels_pallas.recurrence.replay.tpu_tails import TailCopies, moved_entries, registers, scratch
from kernels_pallas.tails import row_numbers
from kernels_pallas.tpu_blocks import F32, LANES, HeadBlocks, dot, in_large_memory

BLOCK_BYTES = 1 << 20  # bytes of state moved at a time: large enough to hide a grid step's fixed cost


class _Prefetched(NamedTuple):
    """What the kernel and the index maps know of each row."""

    anchor: Any
    anchor_length: Any
    length: Any
    num_tokens: Any
    write: Any
    boundary: Any
    tail_id: Any
    fetched: Any
    """By `_named`; so is what is flushed."""
    flushed: Any


@dataclasses.dataclass(frozen=True)
class Row:
    """The current row and block, inside of a kernel."""

    blocks: HeadBlocks
    block: Any
    start: Any
    """Tokens before the new ones."""
    count: Any
    """New tokens, at least 1."""
    anchor_length: Any
    boundary: Any
    has_anchor: Any
    is_due: Any
    """Whether a state is due."""
    steps: int
    entries: int

    def position(self, axis: int):
        """Positions of the tokens at the entries, along one axis of two."""
        entry = lax.broadcasted_iota(jnp.int32, (self.entries, 1) if axis == 0 else (1, self.entries), axis)
        return self.anchor_length + ((entry - self.anchor_length) & (self.entries - 1))

    def lanes(self, tail, number, width: int):
        """Returns block `number` of a tail's lanes, [entries, width], float32."""
        lanes = pl.ds(pl.multiple_of(number * width, LANES), width) if width < tail.shape[2] else slice(None)
        return tail[:, :, lanes].astype(F32).reshape(self.entries, width)

    def append(self, tail, new, number=0):
        """Adds the new tokens [steps, width] to block `number` of a tail's lanes.

        Returns all tokens' entries [entries, width], float32; zeros where there is no token.
        """
        along, width = self.position(0), new.shape[1]
        lanes = pl.ds(pl.multiple_of(number * width, LANES), width) if width < tail.shape[2] else slice(None)
        merged = self.lanes(tail, number, width)
        for t in range(self.steps):
            here = (along == self.start + t) & (t < self.count)
            merged = jnp.where(here, new[t : t + 1].astype(F32), merged)
        tail[:, :, lanes] = merged.reshape(*tail.shape[:2], width).astype(tail.dtype)
        return jnp.where(along < self.start + self.count, merged, 0)


class HeadDecays(NamedTuple):
    """Log decays between tokens with one decay for each head, in scratch memory: [blocks, ...] each.

    They are differences of sums over the tokens after each of two: for recent tokens of a few terms, which keep their
    digits however much the older tokens have decayed.
    """

    since_anchor: Any
    """[steps, heads]: from the anchor up to and with each new token."""
    to_come: Any
    """[steps, heads]: minus the sum over the tokens after each new one."""
    rest: Any
    """[heads, entries]: minus the sum over the tokens after each entry's."""
    due_since_anchor: Any
    """[heads, 1]: from the anchor to the boundary."""
    due_to_come: Any
    """[heads, 1]: minus the sum over the tokens from the boundary on."""

    @staticmethod
    def scratch(blocks: HeadBlocks, steps: int, entries: int) -> list[Any]:
        """Returns the memory for the decays of all blocks of a row."""
        shapes = (steps, blocks.heads), (steps, blocks.heads), (blocks.heads, entries), (blocks.heads, 1)
        return [pltpu.VMEM((blocks.count, *shape), F32) for shape in (*shapes, shapes[-1])]

    def prepare(self, row: Row, log_decay, steps_of, log_scale=None) -> None:
        """Computes the decays of all blocks from those of all entries, [entries, heads].

        Args:
            steps_of: the numbers of new tokens that `since_anchor` and `to_come` are for, [steps, 1].
            log_scale: a factor of each entry, in logs, to take off `rest`.
        """
        along, across, heads = row.position(0), row.position(1), row.blocks.heads

        def sums(chosen):
            return dot(chosen.astype(F32), log_decay, (1, 0), F32)

        def column(decays, here):
            """Returns sums over entries as a column of heads."""
            total = jnp.sum(decays, axis=0, keepdims=True)
            return jnp.broadcast_to(total[:, here], (8, heads)).T[:, :1]

        rest = -sums(across > along)
        rest = (rest if log_scale is None else rest - log_scale).T
        done, ahead = sums(across <= row.start + steps_of), -sums(across > row.start + steps_of)
        before_due = jnp.where(along < row.boundary, log_decay, 0)
        for k in range(row.blocks.count):
            here = slice(k * heads, (k + 1) * heads)
            self.since_anchor[k], self.to_come[k], self.rest[k] = done[:, here], ahead[:, here], rest[here]
            self.due_since_anchor[k] = column(before_due, here)
            self.due_to_come[k] = -column(log_decay - before_due, here)


def fine_dot(left, right, contract: tuple[int, int], dtype: DTypeLike):
    """Multiplies as `dot`; the float32 left operand is split into two parts of the dtype to keep twice its digits."""
    if dtype == F32:
        return dot(left, right, contract, dtype)
    coarse = left.astype(dtype)
    return dot(coarse, right, contract, dtype) + dot(left - coarse.astype(F32), right, contract, dtype)


def replay(
    compute, value, states, tail, inputs, places: Anchored, *, blocks: HeadBlocks, memory, asked: int, interpret: bool
):
    """Runs the kernel. Returns y, of the value's shape and dtype, states and tail.

    Args:
        compute: `compute(row, inputs, state_in, y, state_out, tail, memory)` computes y and the state of one `Row`
            with tokens, and appends those to its tail, which is in VMEM as by `registers`.
        inputs: arrays and their `BlockSpec`s, whose index maps begin with (row, block).
        memory: scratch memory of `compute`.
        asked: vectors of each step that read the states.
    """
    rows, steps, heads, head_dim = value.shape
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary = row_numbers(places)
    named = _named(anchor, anchor > 0, blocks), _named(write, write > 0, blocks)
    scalars = _Prefetched(anchor, anchor_length, length, num_tokens, write, boundary, tail_id, *named)

    def block(named):
        def index(i, h, rows):
            slot, there = named(rows)
            return slot[i], jnp.where(there[i] < 0, h, there[i]), 0, 0

        return pl.BlockSpec((1, blocks.heads, head_dim, states.shape[3]), index)

    there_are = [v for v in tail if v is not None]
    rings = [registers(v) for v in there_are]
    arrays = [array for array, _ in inputs]
    there = pl.BlockSpec(memory_space=pltpu.HBM)
    stores = [(states, block(lambda rows: rows.fetched), block(lambda rows: rows.flushed))]
    stores += [(ring if interpret else in_large_memory(ring), there, there) for ring in rings]
    shape = jax.ShapeDtypeStruct((rows, steps, heads * head_dim), value.dtype)
    y, states, *rings = tpu_pipeline.call_in_place(
        functools.partial(_kernel, compute=compute, blocks=blocks, entries=tail[0].shape[1]),
        inputs,
        (shape, pl.BlockSpec((1, steps, blocks.heads * head_dim), lambda i, h, *_: (i, 0, h))),
        stores,
        [jax.tree.map(lambda v: v.astype(jnp.int32), scalars)],
        grid=(rows, blocks.count),
        memory=[scratch(rings), memory],
        parallel=False,
        cost=_cost(arrays, value, states, tail, asked, places.interval),
        interpret=interpret,
        name="recurrence_replay",
    )
    new_tail = type(tail)(*(ring.reshape(v.shape) for ring, v in zip(rings, there_are, strict=True)))
    return y.reshape(value.shape), states, new_tail


def _named(index, wanted, blocks: HeadBlocks):
    """Selects each row's slot: its own, or that of the last earlier row that needs one, or of the next one.

    Returns the index, and the block that is already in VMEM; -1 if the row needs its own blocks.
    """
    number = jnp.arange(len(index))
    before = lax.cummax(jnp.where(wanted, number, -1))
    source = jnp.where(before >= 0, before, jnp.argmax(wanted))
    place = jnp.where(wanted, -1, jnp.where(before >= 0, blocks.count - 1, 0))
    return jnp.where(wanted.any(), index[source], 0), place


def _kernel(rows, inputs, stores, y, new_stores, of_tails, memory, *, compute, blocks: HeadBlocks, entries: int):
    number, block = (pl.program_id(axis) for axis in range(2))
    last, state_in, (state_out, *there) = pl.num_programs(0) - 1, stores[0], new_stores
    tails_of = TailCopies(rows, there, *of_tails)
    pl.when(block == 0)(lambda: tails_of.bring(number, last))
    count = rows.num_tokens[number]

    @pl.when(count == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when(count > 0)
    def _():
        numbers = rows.length[number], count, rows.anchor_length[number], rows.boundary[number]
        row = Row(blocks, block, *numbers, rows.anchor[number] > 0, rows.write[number] > 0, y.shape[1], entries)
        compute(row, inputs, state_in, y, state_out, tails_of.at_hand(number), memory)

    pl.when(block == blocks.count - 1)(lambda: tails_of.put_back(number, last))


def _cost(inputs, value, states, tail, asked: int, interval: int) -> pl.CostEstimate:
    """Of products of `asked` vectors of each step with the state and with a tail's tokens."""
    (rows, steps, heads, head_dim), size, entries = value.shape, states.shape[3], tail[0].shape[1]
    channels, steps_asked = heads * head_dim, steps * asked
    entry_bytes = sum(v.shape[2] * v.dtype.itemsize for v in tail if v is not None)
    tail_bytes = int(moved_entries(entries, steps, interval) * entry_bytes)
    # A state is due once per interval; drafts of several steps may reach it.
    written = min(rows, -(-rows * steps // interval))
    return pl.CostEstimate(
        flops=2 * rows * steps_asked * channels * (size + entries) + 2 * written * channels * size * entries,
        transcendentals=rows * heads * steps_asked * entries,
        bytes_accessed=(rows + written) * channels * size * states.dtype.itemsize
        + rows * tail_bytes
        + sum(v.size * v.dtype.itemsize for v in (*inputs, value)),
    )
