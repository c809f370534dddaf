"""One row and block of a replay on TPU that does not erase; the matrix unit reads the anchors.

The outputs of all new tokens are three products: queries with the anchor, queries with the tail's keys, and the decayed
scores with the tail's values. The ring of a tail is not reordered: a product with a mask of positions computes the sums
over the tokens before each token. The products that form the written state keep twice the digits of the value's dtype,
because later steps continue from that state.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.recurrence.replay.tpu_rows import HeadDecays, Row, fine_dot
from kernels_pallas.tpu_blocks import HeadBlocks, dot, heads_together

F32 = jnp.float32


def compute(row: Row, inputs, state_in, y, state_out, tail, memory, *, head_dim: int):
    """Computes the block; see `kernels_pallas.recurrence.replay.tpu_rows.replay`."""
    query, key, value, log_decay, strength, skip = inputs
    tail_value, tail_key, tail_decay, tail_strength = tail
    decays = HeadDecays(*memory)
    blocks, block, steps = row.blocks, row.block, row.steps
    step, across = lax.broadcasted_iota(jnp.int32, (steps, 1), 0), row.position(1)

    @pl.when(block == 0)
    def _():
        strengths = row.append(tail_strength, strength[0])
        decays.prepare(row, row.append(tail_decay, log_decay[0]), step, jnp.log(strengths))

    values = row.append(tail_value, value[0], block)
    keys = row.append(tail_key, key[0], blocks.block_of_groups(block))
    queries = jnp.where(step < row.count, query[0].astype(F32), 0)
    skipped = jnp.where(step < row.count, value[0].astype(F32), 0) * skip[...]
    later = jnp.where(across <= row.start + step, 0.0, -jnp.inf)
    sizes = Sizes(blocks, head_dim, keys.shape[1] // blocks.groups, value.dtype)
    passed, ahead, rest = decays.since_anchor[block], decays.to_come[block], decays.rest[block]
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
        before = jnp.where(row.has_anchor, read * sizes.join(from_anchor, 1), 0)
        out = sizes.join(inside, 1) + before + skipped[:, lanes]
        y[0, :, lanes] = jnp.where(step < row.count, out, 0).astype(y.dtype)

    pl.when(row.is_due)(lambda: write_due(row, sizes, decays, values, keys, state_in, state_out))


def write_due(row: Row, sizes: "Sizes", decays: HeadDecays, values, keys, state_in, state_out):
    """Writes the state at the boundary, of what tokens add [entries, heads * head_dim] and their keys."""
    passed, ahead, rest = (v[row.block] for v in (decays.due_since_anchor, decays.due_to_come, decays.rest))
    for group, heads, lanes in sizes.together():
        here = slice(group * sizes.state, (group + 1) * sizes.state)
        # The decay from each token to the boundary; masked before exp.
        kept = [
            jnp.exp(jnp.where(row.position(1) < row.boundary, ahead[head : head + 1] - rest[head : head + 1], -jnp.inf))
            for head in range(heads.start, heads.stop)
        ]
        weights = sizes.join([jnp.broadcast_to(v, (lanes.stop - lanes.start, row.entries)) for v in kept], 0)
        added = fine_dot(values[:, lanes].T * weights, keys[:, here], (1, 0), sizes.dtype)
        old = jnp.where(row.has_anchor, state_in[0, heads].astype(F32), 0) * jnp.exp(passed[heads])[:, :, None]
        state_out[0, heads] = (old + added.reshape(old.shape)).astype(state_out.dtype)


class Sizes:
    """Divides a block's heads into products whose channels fill the lanes of a register."""

    def __init__(self, blocks: HeadBlocks, head_dim: int, state: int, dtype) -> None:
        self.state, self.dtype, self._blocks, self._head_dim = state, dtype, blocks, head_dim
        self.dot = functools.partial(dot, dtype=dtype)

    def together(self):
        """Yields groups, and the heads and lanes of each product."""
        repeats = self._blocks.heads // self._blocks.groups
        several = heads_together(self._head_dim, repeats)
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
