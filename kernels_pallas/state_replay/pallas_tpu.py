"""The replay as one TPU kernel, on the grid of `kernels_pallas.tpu_replay`; the matrix unit reads the anchors.

In the form of `kernels_pallas.state_replay.xla`, the outputs of all new tokens are three products: C with the anchor,
C with B of the tail, and the decayed scores with x of the tail. The ring of a tail is not reordered: a product with a
mask of positions computes the sums over the tokens before each token. Operands have x's dtype and sums are float32.
The products that form the written state keep twice as many digits, because later steps continue from that state. With
float32 inputs, products keep full precision.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_replay
from kernels_pallas.heads import HeadBlocks
from kernels_pallas.tpu_blocks import blocks_in_lanes, dot, heads_together
from kernels_pallas.tpu_replay import BLOCK_BYTES, HeadDecays, Inputs, Row, fine_dot, group_block

F32 = jnp.float32


def unsupported(states, tail, x, dt, a, b, c, d, **places):
    """Returns why this call cannot run, or None."""
    return "it is empty" if 0 in (*x.shape, *b.shape) else None


def state_replay(states, tail, x, dt, a, b, c, d, *, interpret=False, **places):
    """See `api.state_replay`."""
    rows, steps, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    blocks = blocks_in_lanes(heads, groups, head_dim, state, states.dtype, block_bytes=BLOCK_BYTES)
    inputs = Inputs(blocks)
    token_bytes = 2 * heads * head_dim * x.dtype.itemsize + 4 * heads + 2 * groups * state * b.dtype.itemsize
    return tpu_replay.replay(
        functools.partial(_compute, head_dim=head_dim),
        states,
        tail,
        [
            inputs.by_head(x.reshape(rows, steps, -1)),
            inputs.whole(dt.astype(F32)),
            inputs.constant(a.astype(F32)),
            inputs.by_group(b),
            inputs.by_group(c),
            inputs.constant(jnp.repeat(d.astype(F32), head_dim), blocks.count),
        ],
        shape=x.shape,
        dtype=x.dtype,
        blocks=blocks,
        memory=HeadDecays.scratch(blocks, steps, tail.x.shape[1]),
        cost=tpu_replay.cost(
            states, tail, rows=rows, steps=steps, interval=places["interval"], inputs_bytes=rows * steps * token_bytes
        ),
        interpret=interpret,
        name="state_replay",
        **places,
    )


def _compute(row: Row, inputs, state_in, y, state_out, tail, memory, *, head_dim: int):
    (x, dt, a, b, c, d), (tail_x, tail_b, tail_dt), decays = inputs, tail, HeadDecays(*memory)
    blocks, block, steps = row.blocks, row.block, row.steps
    step, across = lax.broadcasted_iota(jnp.int32, (steps, 1), 0), row.position(1)

    @pl.when(block == 0)
    def _():
        dts = row.append(tail_dt, dt[0])
        decays.prepare(row, dts * a[...], step, jnp.log(dts))

    values = row.append(tail_x, x[0], block)
    keys = row.append(tail_b, b[0], group_block(blocks, block))
    queries = jnp.where(step < row.count, c[0].astype(F32), 0)
    skipped = jnp.where(step < row.count, x[0].astype(F32), 0) * d[...]
    later = jnp.where(across <= row.start + step, 0.0, -jnp.inf)
    sizes = _Sizes(blocks, head_dim, keys.shape[1] // blocks.groups, x.dtype)
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

    @pl.when(row.is_due)
    def _():
        passed, ahead = decays.due_since_anchor[block], decays.due_to_come[block]
        for group, heads, lanes in sizes.together():
            here = slice(group * sizes.state, (group + 1) * sizes.state)
            # The decay from each token to the boundary; masked before exp.
            kept = [
                jnp.exp(jnp.where(across < row.boundary, ahead[head : head + 1] - rest[head : head + 1], -jnp.inf))
                for head in range(heads.start, heads.stop)
            ]
            weights = sizes.join([jnp.broadcast_to(v, (lanes.stop - lanes.start, row.entries)) for v in kept], 0)
            added = fine_dot(values[:, lanes].T * weights, keys[:, here], (1, 0), x.dtype)
            old = jnp.where(row.has_anchor, state_in[0, heads].astype(F32), 0) * jnp.exp(passed[heads])[:, :, None]
            state_out[0, heads] = (old + added.reshape(old.shape)).astype(state_out.dtype)


class _Sizes:
    """Divides a block's heads into products whose channels fill the lanes of a register."""

    def __init__(self, blocks: HeadBlocks, head_dim: int, state: int, dtype) -> None:
        self.state, self._blocks, self._head_dim = state, blocks, head_dim
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
