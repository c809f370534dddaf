"""The scan as one TPU kernel: a sequential grid over tiles, the state in VMEM from a row's first tile to its last.

The grid is (blocks of heads, tiles). Slot numbers are prefetched: the pipeline fetches a row's state at its first tile
and writes the state after a tile to the tile's slot, if it has one. The store is input and output in one buffer. Writes
to slot 0 are not skipped, because the null slot may hold anything.

Within a tile, all computations are matrix products (Dao and Gu, 2024, section 6) of operands in x's dtype, summed in
float32. The decay is a difference of running sums, masked before `exp`. Running sums are products too, because Mosaic
has no cumulative sum. With float32 inputs, products keep full precision.

The pipeline fetches a row's state once. It fetches the next row's state while it writes this one's. Therefore no row
may write a slot that another row reads (`kernels_pallas.slots`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Int

from kernels_pallas.heads import HeadBlocks
from kernels_pallas.tpu_blocks import LANES, blocks_in_lanes, dot

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
    first, read, write, fetched, flushed = slots_of_tiles(tile_first, read_slot, write_slot)

    def per_tile(*last, by_block):
        return pl.BlockSpec((1, *last), lambda h, i, *_: (i, 0, h) if by_block else (i, 0, 0))

    per_head = per_tile(size, blocks.heads * head_dim, by_block=True)
    groups_block = (lambda h: h) if blocks.heads >= blocks.repeats else blocks.first_group
    per_group = pl.BlockSpec((1, size, blocks.groups * state), lambda h, i, *_: (i, 0, groups_block(h)))
    slot = (1, blocks.heads, head_dim, state)
    y, store = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, head_dim=head_dim),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(blocks.count, tiles),
            in_specs=[
                per_head,
                pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0)),
                pl.BlockSpec((blocks.heads, 1), lambda h, i, *_: (h, 0)),
                per_group,
                per_group,
                pl.BlockSpec((1, blocks.heads * head_dim), lambda h, i, *_: (0, h)),
                per_tile(1, size, by_block=False),
                pl.BlockSpec(slot, lambda h, i, first, read, write, live, fetch, flush: (fetch[i], h, 0, 0)),
            ],
            out_specs=[
                per_head,
                pl.BlockSpec(slot, lambda h, i, first, read, write, live, fetch, flush: (flush[i], h, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM(slot[1:], F32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((tiles, size, heads * head_dim), x.dtype),
            jax.ShapeDtypeStruct(store.shape, store.dtype),
        ],
        input_output_aliases={13: 1},
        # Blocks of heads access disjoint parts of every slot (the null slot included).
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_cost(x, b, store, blocks),
        interpret=interpret,
        name="ssd_scan",
    )(
        *(first, read, write, real.any(axis=1).astype(jnp.int32), fetched, flushed),
        x.reshape(tiles, size, heads * head_dim),
        dt.astype(F32).swapaxes(1, 2),
        a.astype(F32)[:, None],
        b.reshape(tiles, size, groups * state),
        c.reshape(tiles, size, groups * state),
        jnp.repeat(d.astype(F32), head_dim)[None],
        real.astype(F32)[:, None],
        store,
    )
    return y.reshape(x.shape), store


def slots_of_tiles(
    tile_first: Bool[Array, " tiles"], read_slot: Int[Array, " tiles"], write_slot: Int[Array, " tiles"]
) -> list[Int[Array, " tiles"]]:
    """Returns the scalars of a kernel over tiles: first, read slot, write slot, slots of the input and output blocks.

    A tile that reads nothing selects the block that the previous tile read; a tile that writes nothing selects the
    block that the next one writes. The pipeline moves a block only when its number changes.
    """
    # The first tile has no previous tile: unless it begins a row, it starts from zeros.
    tile_first, read_slot = tile_first.at[0].set(True), jnp.where(tile_first, read_slot, 0)
    tiles = len(tile_first)
    number = jnp.arange(tiles)
    fetched = read_slot[lax.cummax(jnp.where(tile_first, number, 0))]
    following = lax.cummin(jnp.where(write_slot > 0, number, tiles - 1), reverse=True)
    return [v.astype(jnp.int32) for v in (tile_first, read_slot, write_slot, fetched, write_slot[following])]


def _kernel(
    tile_first, read_slot, write_slot, live, _fetched, _flushed,
    x, dt, a, b, c, d, real, state_in, y, state_out, carry, *, blocks: HeadBlocks, head_dim: int,
):  # fmt: skip
    tile = pl.program_id(1)

    @pl.when(tile_first[tile] > 0)
    def _():
        # A select, not a product: the null slot may hold NaN.
        carry[...] = jnp.where(read_slot[tile] > 0, state_in[0].astype(F32), 0)

    @pl.when(live[tile] > 0)
    def _():
        scan_tile(x, dt, a, b, c, d, real, y, carry, state_out.dtype, blocks=blocks, head_dim=head_dim)

    @pl.when(live[tile] == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when(write_slot[tile] > 0)
    def _():
        state_out[0] = carry[...].astype(state_out.dtype)


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
    together = _heads_together(head_dim, repeats)
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


def _heads_together(head_dim, repeats):
    """Returns the number of heads whose channels fill the lanes of a register."""
    together = LANES // head_dim if LANES % head_dim == 0 else 1
    return together if repeats % together == 0 else 1


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
