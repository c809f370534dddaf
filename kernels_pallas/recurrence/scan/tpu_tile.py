"""The scan of one tile on TPU, for recurrences that do not erase and decay by heads.

All computations are matrix products (Dao and Gu, 2024, section 6) of operands in the value's dtype, summed in float32.
The decay is a difference of running sums, masked before `exp`. Running sums are products too, because Mosaic has no
cumulative sum. With float32 inputs, products keep full precision.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.tpu_blocks import HeadBlocks, dot, heads_together

F32 = jnp.float32


def scan_tile(inputs, y, carry, stored, *, blocks: HeadBlocks, head_dim: int):
    """Scans one tile inside a kernel: writes y [1, size, heads * head_dim], updates `carry` [heads, head_dim, state],
    rounded to the dtype `stored`.

    Inputs are references to query, key, value, log_decay and strength [1, heads, size], the direct path's weights by
    channel, and an array [1, 1, size] that is 1 for tokens.
    """
    query, key, value, log_decay, strength, skip, real = inputs
    size, state, strength = value.shape[1], carry.shape[2], strength[0]
    product = functools.partial(dot, dtype=value.dtype)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    # Inclusive sums over tokens, [heads, size]: the log of the decay from the tile's start.
    decay_rows = dot(log_decay[0], (row <= column).astype(F32), (1, 0), F32)
    last = decay_rows[:, size - 1 :]
    to_end, decay = strength * jnp.exp(last - decay_rows), decay_rows.T
    # exp(decay[q] - taken[k]) is the decay from token k to token q, times strength[k].
    taken = decay_rows - jnp.log(strength)
    above_diagonal = jnp.where(row >= column, 0.0, -jnp.inf)
    # Padding may hold NaN, and 0 * NaN is NaN: values are masked as well as strengths.
    mask = jnp.sum(jnp.where(row == column, real[0], 0), axis=1, keepdims=True) > 0

    repeats = blocks.heads // blocks.groups
    together = heads_together(head_dim, repeats)
    width = together * head_dim
    by_lane = lax.div(lax.broadcasted_iota(jnp.int32, (size, width), 1), head_dim)
    by_row = lax.div(lax.broadcasted_iota(jnp.int32, (width, size), 0), head_dim)

    def join(parts, which):
        """Selects part i where `which` is i."""
        out = parts[0]
        for i in range(1, together):
            out = jnp.where(which == i, parts[i], out)
        return out

    for group in range(blocks.groups):
        lanes = slice(group * state, (group + 1) * state)
        keys, queries = (jnp.where(mask, v[0, :, lanes].astype(F32), 0) for v in (key, query))
        scores = product(queries, keys, (1, 1))
        for first in range(group * repeats, (group + 1) * repeats, together):
            lanes, here = slice(first * head_dim, first * head_dim + width), slice(first, first + together)
            heads = [slice(first + i, first + i + 1) for i in range(together)]
            values = jnp.where(mask, value[0, :, lanes].astype(F32), 0)
            inside, from_start = [], []
            for head in heads:
                decay_here = jnp.broadcast_to(decay[:, head], (size, max(size, width)))
                # Masked before exp: above the diagonal it could overflow.
                weights = jnp.exp(decay_here[:, :size] - taken[head] + above_diagonal)
                inside.append(product(scores * weights, values, (1, 0)))
                from_start.append(jnp.exp(decay_here[:, :width]))
            before = product(queries, carry[here].reshape(width, state), (1, 1)) * join(from_start, by_lane)
            y[0, :, lanes] = (join(inside, by_lane) + before + values * skip[:, lanes]).astype(y.dtype)
            added = product(values.T * join([to_end[head] for head in heads], by_row), keys, (1, 0))
            new = carry[here] * jnp.exp(last[here])[:, :, None] + added.reshape(together, head_dim, state)
            # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
            carry[here] = new.astype(stored).astype(F32)
