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
from kernels_pallas.tpu_blocks import F32, dot, join_heads


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
    state, product = keys.shape[1] // blocks.groups, functools.partial(dot, dtype=value.dtype)
    passed, ahead, rest = decays.since_anchor[block], decays.to_come[block], decays.rest[block]
    for group, heads, lanes in blocks.together(head_dim):
        here = slice(group * state, (group + 1) * state)
        scores = product(queries[:, here], keys[:, here], (1, 1))
        inside, from_anchor = [], []
        for head in range(heads.start, heads.stop):
            one = slice(head, head + 1)
            # Masked before exp: for later tokens exp could overflow.
            weights = scores * jnp.exp(ahead[:, one] - rest[one] + later)
            inside.append(product(weights, values[:, lanes], (1, 0)))
            from_anchor.append(jnp.broadcast_to(jnp.exp(passed[:, one]), (steps, lanes.stop - lanes.start)))
        read = product(queries[:, here], state_in[0, heads].reshape(-1, state), (1, 1))
        # A select, not a product: the null slot may hold NaN.
        before = jnp.where(row.has_anchor, read * join_heads(from_anchor, head_dim, 1), 0)
        out = join_heads(inside, head_dim, 1) + before + skipped[:, lanes]
        y[0, :, lanes] = jnp.where(step < row.count, out, 0).astype(y.dtype)

    pl.when(row.is_due)(lambda: write_due(row, head_dim, decays, values, keys, state_in, state_out, value.dtype))


def write_due(row: Row, head_dim: int, decays: HeadDecays, values, keys, state_in, state_out, dtype) -> None:
    """Writes the state at the boundary, of what tokens add [entries, heads * head_dim] and their keys."""
    passed, ahead, rest = (v[row.block] for v in (decays.due_since_anchor, decays.due_to_come, decays.rest))
    state = state_out.shape[3]
    for group, heads, lanes in row.blocks.together(head_dim):
        here = slice(group * state, (group + 1) * state)
        # The decay from each token to the boundary; masked before exp.
        kept = [
            jnp.exp(jnp.where(row.position(1) < row.boundary, ahead[head : head + 1] - rest[head : head + 1], -jnp.inf))
            for head in range(heads.start, heads.stop)
        ]
        weights = [jnp.broadcast_to(v, (lanes.stop - lanes.start, row.entries)) for v in kept]
        added = fine_dot(values[:, lanes].T * join_heads(weights, head_dim, 0), keys[:, here], (1, 0), dtype)
        old = jnp.where(row.has_anchor, state_in[0, heads].astype(F32), 0) * jnp.exp(passed[heads])[:, :, None]
        state_out[0, heads] = (old + added.reshape(old.shape)).astype(state_out.dtype)
