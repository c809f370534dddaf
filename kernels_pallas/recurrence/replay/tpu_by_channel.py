"""One row and block of a replay on TPU that erases, where every channel of a key decays on its own.

The equations are those of `kernels_pallas.recurrence.replay.by_channel`: decays scale the operands, and the decay
between a token of the tail and a new one is the decay to the end of the tail times the decay from there on. Decays
between the few new tokens are sums of those in between.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.recurrence.replay.tpu_rows import Row
from kernels_pallas.tpu_blocks import accurate_dot, dot

F32 = jnp.float32


def compute(row: Row, asked, values, share, inputs, state_in, y, state_out, tail, *, head_dim: int):
    """Computes one row and block.

    Args:
        asked: k of each new token, q of each, zeros [rows, groups * state]; values [rows, heads * head_dim] and share
            [rows, heads] are those of the rows of k, and zeros.
        inputs: k [1, steps, groups * state] and log_decay [1, steps, heads * state] of new tokens.
    """
    (k, log_decay), (tail_u, tail_k, tail_decay) = inputs, tail
    blocks, block, steps = row.blocks, row.block, row.steps
    product = functools.partial(dot, dtype=y.dtype)
    number = lax.broadcasted_iota(jnp.int32, (asked.shape[0], 1), 0)
    is_k = number < steps
    step = jnp.where(is_k, number, number - steps)
    real = lax.broadcasted_iota(jnp.int32, (steps, 1), 0) < row.count
    along, later = row.position(0), (row.position(1) > row.position(0)).astype(F32)
    is_old = along < row.start

    keys = row.append(tail_k, k[0], blocks.block_of_groups(block))
    logs = row.append(tail_decay, log_decay[0], block)
    old_logs, new = jnp.where(is_old, logs, 0), jnp.where(real, log_decay[0], 0)
    after = jnp.exp(dot(later, old_logs, (1, 0), F32))  # from each entry to the end of the tail
    whole = jnp.exp(jnp.sum(old_logs, axis=0, keepdims=True))
    width, state = blocks.heads * head_dim, keys.shape[1] // blocks.groups
    old_u = jnp.where(is_old, row.lanes(tail_u, block, width), 0)
    added = []
    for group in range(blocks.groups):
        here = slice(group * state, (group + 1) * state)
        for head in range(blocks.heads)[blocks.heads_of(group)]:
            one, lanes = slice(head, head + 1), slice(head * head_dim, (head + 1) * head_dim)
            channels = slice(head * state, (head + 1) * state)
            # Sums of log decays from after token t up to and with the token of each row: of t = steps - 1, ..., -1.
            between = [jnp.zeros((asked.shape[0], state), F32)]
            for t in reversed(range(steps)):
                between.append(between[-1] + jnp.where(step >= t, new[t : t + 1, channels], 0))
            between = between[::-1]
            decayed = asked[:, here] * jnp.exp(between[0])
            old_keys = jnp.where(is_old, keys[:, here], 0) * after[:, channels]
            read = product(decayed * whole[:, channels], state_in[0, head], (1, 1))
            found = product(product(decayed, old_keys, (1, 1)), old_u[:, lanes], (1, 0))
            # A select, not a product: the null slot may hold NaN.
            found += jnp.where(row.has_anchor, read, 0)
            found = jnp.where(is_k, share[:, one] * (values[:, lanes] - found), found)
            sign = jnp.where(is_k, -share[:, one], 1)
            for t in range(steps):
                # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
                u = found[t : t + 1].astype(tail_u.dtype).astype(F32)
                pairs = asked[:, here] * asked[t : t + 1, here] * jnp.exp(between[t + 1])
                # What a token reads by its k excludes itself.
                reads = step >= t + is_k.astype(jnp.int32)
                found += jnp.where(reads, jnp.sum(pairs, axis=1, keepdims=True), 0) * sign * u
            y[0, :, lanes] = jnp.where(real, found[steps : 2 * steps], 0).astype(y.dtype)
            added.append(found[:steps])
    u = row.append(tail_u, jnp.concatenate(added, axis=1).astype(tail_u.dtype), block)

    def write() -> None:
        absorbed = along < row.boundary
        due_logs = jnp.where(absorbed, logs, 0)
        until, total = dot(later, due_logs, (1, 0), F32), jnp.sum(due_logs, axis=0, keepdims=True)
        for group in range(blocks.groups):
            here = slice(group * state, (group + 1) * state)
            for head in range(blocks.heads)[blocks.heads_of(group)]:
                lanes, channels = slice(head * head_dim, (head + 1) * head_dim), slice(head * state, (head + 1) * state)
                decayed = jnp.where(absorbed, keys[:, here], 0) * jnp.exp(until[:, channels])
                old = jnp.where(row.has_anchor, state_in[0, head].astype(F32), 0) * jnp.exp(total[:, channels])
                fed = accurate_dot(u[:, lanes].T, decayed, y.dtype)
                state_out[0, head] = (old + fed).astype(state_out.dtype)

    row.when_due(write)
