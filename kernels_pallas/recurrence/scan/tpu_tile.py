"""The scan of one tile on TPU, for recurrences that do not erase and decay by heads.

All computations are matrix products (Dao and Gu, 2024, section 6) of operands in the value's dtype, summed in float32.
The decay is a difference of running sums, masked before `exp`. Running sums are products too, because Mosaic has no
cumulative sum. With float32 inputs, products keep full precision.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.tpu_blocks import F32, HeadBlocks, dot, join_heads


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

    for group, here, lanes in blocks.together(head_dim):
        if here.start % (blocks.heads // blocks.groups) == 0:
            of_group = slice(group * state, (group + 1) * state)
            keys, queries = (jnp.where(mask, v[0, :, of_group].astype(F32), 0) for v in (key, query))
            scores = product(queries, keys, (1, 1))
        width, heads = lanes.stop - lanes.start, [slice(head, head + 1) for head in range(here.start, here.stop)]
        values = jnp.where(mask, value[0, :, lanes].astype(F32), 0)
        inside, from_start = [], []
        for head in heads:
            decay_here = jnp.broadcast_to(decay[:, head], (size, max(size, width)))
            # Masked before exp: above the diagonal it could overflow.
            weights = jnp.exp(decay_here[:, :size] - taken[head] + above_diagonal)
            inside.append(product(scores * weights, values, (1, 0)))
            from_start.append(jnp.exp(decay_here[:, :width]))
        before = product(queries, carry[here].reshape(width, state), (1, 1)) * join_heads(from_start, head_dim, 1)
        y[0, :, lanes] = (join_heads(inside, head_dim, 1) + before + values * skip[:, lanes]).astype(y.dtype)
        left = join_heads([jnp.broadcast_to(to_end[head], (width, size)) for head in heads], head_dim, 0)
        added = product(values.T * left, keys, (1, 0)).reshape(-1, head_dim, state)
        # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
        carry[here] = (carry[here] * jnp.exp(last[here])[:, :, None] + added).astype(stored).astype(F32)
