"""The scan as one TPU kernel: a sequential grid over tiles, the state in VMEM from a row's first tile to its last.

The grid is that of `kernels_pallas.tpu_pipeline.scan`, with blocks of heads.

Within a tile, all computations are matrix products (Dao and Gu, 2024, section 6) of operands in x's dtype, summed in
float32. The decay is a difference of running sums, masked before `exp`. Running sums are products too, because Mosaic
has no cumulative sum. With float32 inputs, products keep full precision.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_pipeline
from kernels_pallas.heads import HeadBlocks
from kernels_pallas.tpu_blocks import blocks_in_lanes, dot, heads_together

F32 = jnp.float32
BLOCK_BYTES = 1 << 20  # bytes of state in a grid step


def unsupported(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """Returns why this call cannot run, or None."""
    return "it is empty" if 0 in (*x.shape, *b.shape) else None


def ssd_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot, interpret=False):
    """See `api.ssd_scan`."""
    tiles, size, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    blocks = blocks_in_lanes(heads, groups, head_dim, state, F32, block_bytes=BLOCK_BYTES)
    real = (dt != 0).any(axis=2)

    def per_tile(*last, by_block):
        return pl.BlockSpec((1, *last), lambda h, i, *_: (i, 0, h) if by_block else (i, 0, 0))

    def compute(_, inputs, y, carry, stored):
        x, dt, a, b, c, d, real = inputs
        scan_tile(x, dt, a, b, c, d, real, y, carry, stored, blocks=blocks, head_dim=head_dim)

    per_head = per_tile(size, blocks.heads * head_dim, by_block=True)
    groups_block = (lambda h: h) if blocks.heads >= blocks.repeats else blocks.first_group
    per_group = pl.BlockSpec((1, size, blocks.groups * state), lambda h, i, *_: (i, 0, groups_block(h)))
    y, store = tpu_pipeline.scan(
        compute,
        [
            (x.reshape(tiles, size, heads * head_dim), per_head),
            (dt.astype(F32).swapaxes(1, 2), pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0))),
            (a.astype(F32)[:, None], pl.BlockSpec((blocks.heads, 1), lambda h, i, *_: (h, 0))),
            (b.reshape(tiles, size, groups * state), per_group),
            (c.reshape(tiles, size, groups * state), per_group),
            (
                jnp.repeat(d.astype(F32), head_dim)[None],
                pl.BlockSpec((1, blocks.heads * head_dim), lambda h, i, *_: (0, h)),
            ),
            (real.astype(F32)[:, None], per_tile(1, size, by_block=False)),
        ],
        (jax.ShapeDtypeStruct((tiles, size, heads * head_dim), x.dtype), per_head),
        store,
        tile_first=tile_first,
        read_slot=read_slot,
        write_slot=write_slot,
        real=real,
        block=(blocks.heads, head_dim, state),
        cost=_cost(x, b, store, blocks),
        interpret=interpret,
        name="ssd_scan",
    )
    return y.reshape(x.shape), store


def scan_tile(x, dt, a, b, c, d, real, y, carry, stored, *, blocks: HeadBlocks, head_dim: int):
    """Scans one tile inside a kernel: writes y [1, size, heads * head_dim], updates `carry` [heads, head_dim, state],
    rounded to the dtype `stored`. All arrays are references; `real` [1, 1, size] is 1 for tokens.
    """
    size, state = x.shape[1], carry.shape[2]
    product = functools.partial(dot, dtype=x.dtype)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    dt_rows = dt[0]
    # Inclusive sums over tokens, [heads, size]: the log of the decay from the tile's start.
    decay_rows = dot(dt_rows * a[...], (row <= column).astype(F32), (1, 0), F32)
    last = decay_rows[:, size - 1 :]
    to_end, decay = dt_rows * jnp.exp(last - decay_rows), decay_rows.T
    # exp(decay[q] - taken[k]) is the decay from token k to token q, times dt[k].
    taken = decay_rows - jnp.log(dt_rows)
    above_diagonal = jnp.where(row >= column, 0.0, -jnp.inf)
    # Padding may hold NaN, and 0 * NaN is NaN: values are masked as well as dt.
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
        bt, ct = (jnp.where(mask, v[0, :, lanes].astype(F32), 0) for v in (b, c))
        scores = product(ct, bt, (1, 1))
        for first in range(group * repeats, (group + 1) * repeats, together):
            lanes, here = slice(first * head_dim, first * head_dim + width), slice(first, first + together)
            heads = [slice(first + i, first + i + 1) for i in range(together)]
            values = jnp.where(mask, x[0, :, lanes].astype(F32), 0)
            inside, from_start = [], []
            for head in heads:
                decay_here = jnp.broadcast_to(decay[:, head], (size, max(size, width)))
                # Masked before exp: above the diagonal it could overflow.
                weights = jnp.exp(decay_here[:, :size] - taken[head] + above_diagonal)
                inside.append(product(scores * weights, values, (1, 0)))
                from_start.append(jnp.exp(decay_here[:, :width]))
            before = product(ct, carry[here].reshape(width, state), (1, 1)) * join(from_start, by_lane)
            y[0, :, lanes] = (join(inside, by_lane) + before + values * d[:, lanes]).astype(y.dtype)
            added = product(values.T * join([to_end[head] for head in heads], by_row), bt, (1, 0))
            new = carry[here] * jnp.exp(last[here])[:, :, None] + added.reshape(together, head_dim, state)
            # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
            carry[here] = new.astype(stored).astype(F32)


def _cost(x, b, store, blocks: HeadBlocks) -> pl.CostEstimate:
    tiles, size, heads, head_dim = x.shape
    state = b.shape[3]
    tokens, head_state = tiles * size, head_dim * state
    flops = 2 * tokens * heads * (size * head_dim + 2 * head_state) + 2 * tokens * size * state * blocks.count
    per_token = 2 * heads * head_dim * x.dtype.itemsize + 4 * heads
    per_token += 2 * blocks.count * blocks.groups * state * b.dtype.itemsize
    return pl.CostEstimate(
        flops=flops,
        transcendentals=tokens * heads * size,
        # Assumes that every tile writes a state; most do not, but at least one row is read and one written.
        bytes_accessed=tokens * per_token + 2 * tiles * heads * head_state * store.dtype.itemsize,
    )
