"""The replay as one TPU kernel, on the grid of `kernels_pallas.recurrence.replay.tpu_rows`.

Decays are those of `by_head`, or of `by_channel`; `tpu_lanes` has the form without erasing. Keys and queries of the new
tokens are the rows of one operand, which the matrix unit multiplies with the anchor, and with the tail's keys and what
they added. A new token then reads the few before it, one after the other, for all its keys and queries at once.
Operands have the value's dtype and sums are float32; what new tokens add to each other, and to the written state, keeps
more digits.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.recurrence.replay import tpu_by_channel, tpu_lanes, tpu_rows
from kernels_pallas.recurrence.replay.tpu_rows import BLOCK_BYTES, HeadDecays, Row
from kernels_pallas.tpu_blocks import F32, blocks_in_lanes, dot

_REGISTER = 8  # rows


def unsupported(entry, store, tail, places, *, erase, skip):
    if entry.by_channel and not erase:
        return "channels decay on their own, and the recurrence does not erase"
    return None


def replay(entry, store, tail, places, *, erase, skip, interpret=False):
    query, key, value, log_decay, strength = entry
    (rows, steps, heads, head_dim), (groups, state) = value.shape, key.shape[2:]
    blocks = blocks_in_lanes(heads, groups, head_dim, state, store.dtype, block_bytes=BLOCK_BYTES)
    by_channel, number = entry.by_channel, _asked(steps) if erase else steps

    def flat(v, place=lambda h: h, count=blocks.count):
        """One of `count` parts of a row's [steps, channels] for each block."""
        v = v.reshape(rows, steps, -1)
        return v, pl.BlockSpec((1, steps, v.shape[2] // count), lambda i, h, *_: (i, 0, place(h)))

    def all_heads(v):
        return flat(v.astype(F32), lambda h: 0, 1)

    inputs = [
        *(flat(v, blocks.block_of_groups, groups // blocks.groups) for v in (query, key)),
        flat(value),
        flat(log_decay.astype(F32)) if by_channel else all_heads(log_decay),
        all_heads(strength),
    ]
    memory = HeadDecays.scratch(blocks, number, tail.value.shape[1])
    if erase:
        memory.append(pltpu.VMEM((blocks.count, number, blocks.heads), F32))
    else:
        weight = jnp.zeros(heads) if skip is None else skip
        of_block = pl.BlockSpec((1, blocks.heads * head_dim), lambda i, h, *_: (0, h))
        inputs.append((jnp.repeat(weight.astype(F32), head_dim)[None], of_block))
    compute = functools.partial(_compute, by_channel=by_channel) if erase else tpu_lanes.compute
    return tpu_rows.replay(
        functools.partial(compute, head_dim=head_dim), value, store, tail, inputs, places,
        blocks=blocks, memory=memory, asked=2 if erase else 1, interpret=interpret,
    )  # fmt: skip


def _asked(steps: int) -> int:
    """Returns the rows of an operand with k and q of each new token: whole registers."""
    return -(-2 * steps // _REGISTER) * _REGISTER


def _padded(*parts, rows: int):
    """Concatenates [n, width] each, float32, with zeros below them."""
    missing = rows - sum(len(part) for part in parts)
    zeros = [jnp.zeros((missing, parts[0].shape[1]), F32)] if missing else []
    return jnp.concatenate([*(part.astype(F32) for part in parts), *zeros])


def _compute(row: Row, inputs, state_in, y, state_out, tail, memory, *, by_channel: bool, head_dim: int):
    (q, k, v, log_decay, beta), (tail_u, tail_k, tail_decay) = inputs, tail
    decays, shares = HeadDecays(*memory[:-1]), memory[-1]
    blocks, block, steps, rows = row.blocks, row.block, row.steps, _asked(row.steps)
    # Rows of operands: k of each new token, q of each, zeros.
    number = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    is_k = number < steps
    step = jnp.where(is_k, number, number - steps)
    live = (step < row.count) & (number < 2 * steps)
    real = lax.broadcasted_iota(jnp.int32, (steps, 1), 0) < row.count

    @pl.when(block == 0)
    def _():
        if not by_channel:
            decays.prepare(row, row.append(tail_decay, log_decay[0]), step)
        share = _padded(jnp.where(real, beta[0], 0), rows=rows)
        for n in range(blocks.count):
            shares[n] = share[:, n * blocks.heads : (n + 1) * blocks.heads]

    asked = jnp.where(live, _padded(k[0], q[0], rows=rows), 0)
    values = _padded(jnp.where(real, v[0].astype(F32), 0), rows=rows)
    keys, share = row.append(tail_k, k[0], blocks.block_of_groups(block)), shares[block]
    old_u = jnp.where(row.position(0) < row.start, row.lanes(tail_u, block, blocks.heads * head_dim), 0)
    state, product, of_tokens = keys.shape[1] // blocks.groups, functools.partial(dot, dtype=v.dtype), (step, is_k)
    if by_channel:
        logs, new = row.append(tail_decay, log_decay[0], block), jnp.where(real, log_decay[0], 0)
        form = tpu_by_channel.reads(row, product, asked, keys, logs, new, of_tokens, state_in)
    else:
        form = _reads(row, product, asked, keys, decays, of_tokens, state_in)
    added = []
    for group in range(blocks.groups):
        here = slice(group * state, (group + 1) * state)
        for head in range(blocks.heads)[blocks.heads_of(group)]:
            one, lanes = slice(head, head + 1), slice(head * head_dim, (head + 1) * head_dim)
            sign = jnp.where(is_k, -share[:, one], 1)
            read, weights, weight_of = form(here, head, sign)
            # A select, not a product: the null slot may hold NaN.
            found = product(weights, old_u[:, lanes], (1, 0)) + jnp.where(row.has_anchor, read, 0)
            found = jnp.where(is_k, share[:, one] * (values[:, lanes] - found), found)
            for t in range(steps):
                # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
                u = found[t : t + 1].astype(tail_u.dtype).astype(F32)
                found += weight_of(t) * u
            y[0, :, lanes] = jnp.where(real, found[steps : 2 * steps], 0).astype(y.dtype)
            added.append(found[:steps])
    u = row.append(tail_u, jnp.concatenate(added, axis=1).astype(tail_u.dtype), block)

    @pl.when(row.is_due)
    def _():
        if by_channel:
            tpu_by_channel.write_due(row, head_dim, u, keys, logs, state_in, state_out, v.dtype)
        else:
            tpu_lanes.write_due(row, head_dim, decays, u, keys, state_in, state_out, v.dtype)


def _reads(row: Row, product, asked, keys, decays: HeadDecays, of_tokens, state_in):
    """Returns a function of a group's lanes, a head and signs [rows, 1]: what the rows of `asked` read from the anchor,
    their weights of the entries' tokens, and a function that returns those of a new token [rows, 1] with their signs.
    """
    (step, is_k), across = of_tokens, row.position(1)
    # What a token reads by its k excludes itself.
    later = jnp.where(across <= row.start + step - is_k.astype(jnp.int32), 0.0, -jnp.inf)
    is_new = [across == row.start + t for t in range(row.steps)]
    passed, ahead, rest = (one[row.block] for one in decays[:3])
    scores: dict[int, Any] = {}  # one product for the heads of a group

    def of_head(here, head, sign):
        if here.start not in scores:
            scores[here.start] = product(asked[:, here], keys[:, here], (1, 1))
        one = slice(head, head + 1)
        # Masked before exp: for later tokens exp could overflow.
        weights = scores[here.start] * jnp.exp(ahead[:, one] - rest[one] + later)
        read = product(asked[:, here], state_in[0, head], (1, 1)) * jnp.exp(passed[:, one])
        signed = sign * weights
        return read, weights, lambda t: jnp.sum(jnp.where(is_new[t], signed, 0), axis=1, keepdims=True)

    return of_head
