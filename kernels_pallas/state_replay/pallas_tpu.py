"""The replay as one TPU kernel: each row's anchor passes through VMEM once, and the matrix unit reads it.

The grid is (rows, blocks of heads). Prefetched slot numbers select the blocks of states that the pipeline fetches and
writes back; states and tails are input and output in one buffer. The pipeline moves a block only when its number
changes, so a row that needs no block (no anchor, no state due, padding) selects the block that is already in VMEM.

Tails stay in HBM. The kernel copies only some entries of each tail, one row ahead of their use: it fetches the entries
with a token since the anchor and writes back those with a new token (`kernels_pallas.tail_copies`).

In the form of `kernels_pallas.state_replay.xla`, the outputs of all new tokens are three products: C with the anchor,
C with B of the tail, and the decayed scores with x of the tail. The ring of a tail is not reordered: a product with a
mask of positions computes the sums over the tokens before each token. Operands have x's dtype and sums are float32.
The products that form the written state keep twice as many digits, because later steps continue from that state. With
float32 inputs, products keep full precision.

The pipeline fetches the next row's anchor while it writes this row's state. Therefore no row may write a slot that
another row reads (`kernels_pallas.slots`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tails
from kernels_pallas.heads import HeadBlocks
from kernels_pallas.tail_copies import TailCopies, moved_entries, registers, scratch
from kernels_pallas.tpu_blocks import LANES, blocks_in_lanes, dot, in_large_memory

F32 = jnp.float32
BLOCK_BYTES = 1 << 20  # bytes of state moved at a time: large enough to hide a grid step's fixed cost


def unsupported(states, tail, x, dt, a, b, c, d, **places):
    """Returns why this call cannot run, or None."""
    return "it is empty" if 0 in (*x.shape, *b.shape) else None


def state_replay(
    states, tail, x, dt, a, b, c, d, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot, interval,
    interpret=False,
):  # fmt: skip
    """See `api.state_replay`."""
    rows, steps, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    entries = tail.x.shape[1]
    blocks = blocks_in_lanes(heads, groups, head_dim, state, states.dtype, block_bytes=BLOCK_BYTES)
    due = tails.next_boundary(length, num_tokens, interval)
    live = num_tokens > 0
    write = jnp.where(due.reached & live, write_slot, 0)
    anchor = jnp.where(live, anchor_slot, 0)
    named = (*_named(anchor, anchor > 0, blocks), *_named(write, write > 0, blocks))
    scalars = anchor, anchor_length, length, num_tokens, write, due.position, tail_id, *named

    def block(h, i, place):
        return jnp.where(place[i] < 0, h, place[i])

    group_block = functools.partial(_group_block, blocks)

    # An index map gets the grid's indices and all scalars; the last four are the indices and blocks of `_named`.
    def of_slots(number):
        return lambda i, h, *s: (s[number][i], block(h, i, s[number + 1]), 0, 0)

    slot, inner, channels = (1, blocks.heads, head_dim, state), blocks.heads * head_dim, blocks.groups * state
    rings = [registers(v) for v in tail]
    there = [pl.BlockSpec(memory_space=pltpu.HBM)] * len(rings)
    per_head = pl.BlockSpec((1, steps, inner), lambda i, h, *_: (i, 0, h))
    per_group = pl.BlockSpec((1, steps, channels), lambda i, h, *_: (i, 0, group_block(h)))
    all_heads = pl.BlockSpec((1, heads), lambda i, h, *_: (0, 0))
    count = len(scalars)
    y, states, *rings = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, head_dim=head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=count,
            grid=(rows, blocks.count),
            in_specs=[
                per_head,
                pl.BlockSpec((1, steps, heads), lambda i, h, *_: (i, 0, 0)),
                all_heads,
                per_group,
                per_group,
                pl.BlockSpec((1, inner), lambda i, h, *_: (0, h)),
                pl.BlockSpec(slot, of_slots(7)),
                *there,
            ],
            out_specs=[per_head, pl.BlockSpec(slot, of_slots(9)), *there],
            scratch_shapes=[
                *scratch(rings),
                pltpu.VMEM((blocks.count, steps, blocks.heads), F32),
                pltpu.VMEM((blocks.count, steps, blocks.heads), F32),
                pltpu.VMEM((blocks.count, blocks.heads, entries), F32),
                pltpu.VMEM((blocks.count, blocks.heads, 1), F32),
                pltpu.VMEM((blocks.count, blocks.heads, 1), F32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, steps, heads * head_dim), x.dtype),
            jax.ShapeDtypeStruct(states.shape, states.dtype),
            *(jax.ShapeDtypeStruct(ring.shape, ring.dtype) for ring in rings),
        ],
        input_output_aliases={count + 6 + i: 1 + i for i in range(4)},
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=_cost(states, tail, x, b, interval),
        interpret=interpret,
        name="state_replay",
    )(
        *(v.astype(jnp.int32) for v in scalars),
        x.reshape(rows, steps, -1),
        dt.astype(F32),
        a.astype(F32)[None],
        b.reshape(rows, steps, -1),
        c.reshape(rows, steps, -1),
        jnp.repeat(d.astype(F32), head_dim)[None],
        states,
        *(ring if interpret else in_large_memory(ring) for ring in rings),
    )
    return y.reshape(x.shape), states, type(tail)(*(ring.reshape(v.shape) for ring, v in zip(rings, tail, strict=True)))


def _group_block(blocks: HeadBlocks, block):
    """Returns the block of groups that a block of heads needs."""
    return block if blocks.heads >= blocks.repeats else blocks.first_group(block)


def _named(index, wanted, blocks: HeadBlocks):
    """Selects each row's slot or tail: its own, or that of the last earlier row that needs one, or of the next one.

    Returns the index, and the block that is already in VMEM; -1 if the row needs its own blocks.
    """
    number = jnp.arange(len(index))
    before = lax.cummax(jnp.where(wanted, number, -1))
    source = jnp.where(before >= 0, before, jnp.argmax(wanted))
    place = jnp.where(wanted, -1, jnp.where(before >= 0, blocks.count - 1, 0))
    return jnp.where(wanted.any(), index[source], 0), place


def _kernel(
    anchor, anchor_length, length, num_tokens, write, boundary, tail_id, _slot, _slot_place, _due, _due_place,
    x, dt, a, b, c, d, state_in, _x, _b, _dt, y, state_out, ring_x, ring_b, ring_dt, held_x, held_b, held_dt,
    fetched, written, since_anchor, to_come, taken, due_since_anchor, due_to_come, *, blocks: HeadBlocks, head_dim: int,
):  # fmt: skip
    row, block = (pl.program_id(axis) for axis in range(2))
    last = pl.num_programs(0) - 1
    tails_of = TailCopies(
        anchor_length,
        length,
        num_tokens,
        tail_id,
        (ring_x, ring_b, ring_dt),
        (held_x, held_b, held_dt),
        fetched,
        written,
    )
    pl.when(block == 0)(lambda: tails_of.bring(row, last))
    tail_x, tail_b, tail_dt = tails_of.at_hand(row)
    _compute(
        anchor, anchor_length, length, num_tokens, write, boundary, x, dt, a, b, c, d, state_in, y, state_out,
        tail_x, tail_b, tail_dt, since_anchor, to_come, taken, due_since_anchor, due_to_come, blocks=blocks,
        head_dim=head_dim,
    )  # fmt: skip
    pl.when(block == blocks.count - 1)(lambda: tails_of.put_back(row, last))


def _compute(
    anchor, anchor_length, length, num_tokens, write, boundary, x, dt, a, b, c, d, state_in, y, state_out,
    tail_x, tail_b, tail_dt, since_anchor, to_come, taken, due_since_anchor, due_to_come, *, blocks: HeadBlocks,
    head_dim: int,
):  # fmt: skip
    """Computes one row and block, and adds the new tokens to the row's tail, which is in VMEM as by `registers`."""
    row, block = (pl.program_id(axis) for axis in range(2))
    steps, entries = x.shape[1], tail_x.shape[0] * tail_x.shape[1]
    start, count = length[row], num_tokens[row]

    @pl.when(count == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when(count > 0)
    def _():
        def position(axis):  # of the token at each entry, along one axis
            first = anchor_length[row]
            entry = lax.broadcasted_iota(jnp.int32, (entries, 1) if axis == 0 else (1, entries), axis)
            return first + ((entry - first) & (entries - 1))

        along, across = position(0), position(1)
        valid = along < start + count
        step = lax.broadcasted_iota(jnp.int32, (steps, 1), 0)

        def append(tail, new, number=0):
            """Returns old and new entries of a block of lanes of a tail, float32; zeros where there is no token."""
            width = new.shape[2]
            lanes = pl.ds(pl.multiple_of(number * width, LANES), width) if width < tail.shape[2] else slice(None)
            merged = tail[:, :, lanes].astype(F32).reshape(entries, width)
            for t in range(steps):
                here = (along == start + t) & (t < count)
                merged = jnp.where(here, new[0, t : t + 1].astype(F32), merged)
            tail[:, :, lanes] = merged.reshape(*tail.shape[:2], width).astype(tail.dtype)
            return jnp.where(valid, merged, 0)

        def column(decays, heads):
            """Returns sums over entries as a column of heads."""
            total = jnp.sum(decays, axis=0, keepdims=True)
            return jnp.broadcast_to(total[:, heads], (8, blocks.heads)).T[:, :1]

        @pl.when(block == 0)
        def _():
            dts = append(tail_dt, dt)
            decay = dts * a[...]

            def sums(chosen):
                return dot(chosen.astype(F32), decay, (1, 0), F32)

            # The decay between two tokens is the difference of the sums over the tokens after each. For recent tokens
            # these are sums of a few terms, which keep their digits however much the older tokens have decayed.
            rest = (-sums(across > along) - jnp.log(dts)).T
            done, ahead = sums(across <= start + step), -sums(across > start + step)
            before_due = jnp.where(along < boundary[row], decay, 0)
            for k in range(blocks.count):
                heads = slice(k * blocks.heads, (k + 1) * blocks.heads)
                since_anchor[k], to_come[k], taken[k] = done[:, heads], ahead[:, heads], rest[heads]
                due_since_anchor[k] = column(before_due, heads)
                due_to_come[k] = -column(decay - before_due, heads)

        values, keys = append(tail_x, x, block), append(tail_b, b, _group_block(blocks, block))
        queries = jnp.where(step < count, c[0].astype(F32), 0)
        skipped = jnp.where(step < count, x[0].astype(F32), 0) * d[...]
        later = jnp.where(across <= start + step, 0.0, -jnp.inf)
        sizes = _Sizes(blocks, head_dim, keys.shape[1] // blocks.groups, x.dtype)
        passed, ahead, rest = since_anchor[block], to_come[block], taken[block]
        has_anchor = anchor[row] > 0
        for group, heads, lanes in sizes.together():
            here = slice(group * sizes.state, (group + 1) * sizes.state)
            scores = sizes.dot(queries[:, here], keys[:, here], (1, 1))
            inside, from_anchor = [], []
            for head in range(heads.start, heads.stop):
                one = slice(head, head + 1)
                # Masked before exp: for later tokens exp could overflow.
                weights = scores * jnp.exp(ahead[:, one] - rest[one] + later)
                inside.append(sizes.dot(weights, values[:, lanes], (1, 0)))
                from_anchor.append(jnp.broadcast_to(jnp.exp(passed[:, one]), (steps, lanes.stop - lanes.start)))
            read = sizes.dot(queries[:, here], state_in[0, heads].reshape(-1, sizes.state), (1, 1))
            # A select, not a product: the null slot may hold NaN.
            before = jnp.where(has_anchor, read * sizes.join(from_anchor, 1), 0)
            out = sizes.join(inside, 1) + before + skipped[:, lanes]
            y[0, :, lanes] = jnp.where(step < count, out, 0).astype(y.dtype)

        @pl.when(write[row] > 0)
        def _():
            passed, ahead = due_since_anchor[block], due_to_come[block]
            for group, heads, lanes in sizes.together():
                here = slice(group * sizes.state, (group + 1) * sizes.state)
                # The decay from each token to the boundary; masked before exp.
                kept = [
                    jnp.exp(jnp.where(across < boundary[row], ahead[head : head + 1] - rest[head : head + 1], -jnp.inf))
                    for head in range(heads.start, heads.stop)
                ]
                weights = sizes.join([jnp.broadcast_to(v, (lanes.stop - lanes.start, entries)) for v in kept], 0)
                added = sizes.fine_dot(values[:, lanes].T * weights, keys[:, here], (1, 0))
                old = jnp.where(has_anchor, state_in[0, heads].astype(F32), 0) * jnp.exp(passed[heads])[:, :, None]
                state_out[0, heads] = (old + added.reshape(old.shape)).astype(state_out.dtype)


class _Sizes:
    """Divides a block's heads into products whose channels fill the lanes of a register."""

    def __init__(self, blocks: HeadBlocks, head_dim: int, state: int, dtype) -> None:
        self.state, self._blocks, self._head_dim, self._dtype = state, blocks, head_dim, dtype
        self.dot = functools.partial(dot, dtype=dtype)

    def together(self):
        """Yields groups, and the heads and lanes of each product."""
        repeats = self._blocks.heads // self._blocks.groups
        several = LANES // self._head_dim if LANES % self._head_dim == 0 else 1
        several = several if repeats % several == 0 else 1
        for first in range(0, self._blocks.heads, several):
            last = first + several
            yield first // repeats, slice(first, last), slice(first * self._head_dim, last * self._head_dim)

    def join(self, parts, axis: int):
        """Takes each head's channels from its part."""
        out = parts[0]
        which = lax.div(lax.broadcasted_iota(jnp.int32, out.shape, axis), self._head_dim)
        for i in range(1, len(parts)):
            out = jnp.where(which == i, parts[i], out)
        return out

    def fine_dot(self, left, right, contract):
        """Multiplies with a float32 left operand, split into two parts of the dtype to keep twice its digits."""
        if self._dtype == F32:
            return self.dot(left, right, contract)
        coarse = left.astype(self._dtype)
        return self.dot(coarse, right, contract) + self.dot(left - coarse.astype(F32), right, contract)


def _cost(states, tail, x, b, interval) -> pl.CostEstimate:
    rows, steps, heads, head_dim = x.shape
    size, entries = b.shape[3], tail.x.shape[1]
    channels = heads * head_dim
    entry_bytes = sum(v.shape[2] * v.dtype.itemsize for v in tail)
    tail_bytes = int(moved_entries(entries, steps, interval) * entry_bytes)
    token_bytes = 2 * channels * x.dtype.itemsize + 4 * heads + 2 * b.shape[2] * size * b.dtype.itemsize
    state_bytes = channels * size * states.dtype.itemsize
    # A state is due once per interval; drafts of several steps may reach it.
    written = min(rows, -(-rows * steps // interval))
    return pl.CostEstimate(
        flops=2 * rows * steps * channels * (size + entries) + 2 * written * channels * size * entries,
        transcendentals=rows * heads * steps * entries,
        bytes_accessed=(rows + written) * state_bytes + rows * tail_bytes + rows * steps * token_bytes,
    )
