"""Convolution, scan, gate and norm as one TPU kernel, which extends `kernels_pallas.recurrence.scan.tpu_tile`.

The kernel fetches a tile's z and x as the projection wrote them. A tile's tokens may begin at any row, but a transfer
must begin at a multiple of `ALIGNED` rows. The kernel therefore fetches `ALIGNED` more rows, from the last aligned row
on, and stores them as float32 in columns of 128 lanes, where a load may begin at any row. The convolution is then a sum
of loads; each tile's context (the last inputs before its first token) precedes the tile. Outputs are stored in such
columns too, after the tokens of the previous tile that did not fill a piece of `ALIGNED` rows. The kernel sends only
whole pieces, tile after tile.

XLA reads and writes the windows. XLA also computes the norm if its groups are wider than a block of heads.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.causal_conv1d.xla import windows_of_tiles
from kernels_pallas.gated_norm.xla import rms_norm
from kernels_pallas.recurrence.scan.pallas_tpu import BLOCK_BYTES
from kernels_pallas.recurrence.scan.tpu_tile import scan_tile
from kernels_pallas.slots import read_slots, write_slots
from kernels_pallas.tpu_blocks import LANES, HeadBlocks, blocks_in_lanes
from kernels_pallas.tpu_pipeline import slots_of_tiles

F32 = jnp.float32
ALIGNED = 16  # rows of 16-bit numbers in a memory tile
CONTEXT = 8  # rows of float32 in a memory tile; more than a convolution looks back
VMEM_BYTES = 32 << 20  # a chip has 64 MiB or more; a kernel's default limit is 16 MiB


def unsupported(zx, query, key, log_decay, strength, weights, store, windows, packed, *, gates):
    tokens, _, inner = zx.shape
    size, width, groups = packed.tile_tokens.shape[1], weights.value_taps.shape[1], key.shape[1]
    if tokens % ALIGNED or size % ALIGNED:
        return f"{tokens} tokens in tiles of {size}, not multiples of {ALIGNED}"
    if width - 1 > CONTEXT:
        return f"a convolution over {width} inputs, more than {CONTEXT + 1}"
    blocks = _blocks(key, store)
    if blocks.heads * store.shape[2] % LANES:
        return f"{blocks.heads} heads of {store.shape[2]}, not a multiple of {LANES} channels"
    if weights.norm is None:
        return None
    if _norms(blocks):
        return None if inner // groups % LANES == 0 else f"a norm of {inner // groups} channels, no multiple of {LANES}"
    return "a norm before the gate, of groups wider than a block of heads" if gates.norm_before_gate else None


def gated_scan(
    zx, query, key, log_decay, strength, weights, store, windows, packed, *, gates, interpret=False
):  # fmt: skip
    tokens, _, inner = zx.shape
    head_dim, state, groups, width = store.shape[2], store.shape[3], key.shape[1], weights.value_taps.shape[1]
    tile_tokens, valid = packed.tile_tokens, packed.tile_valid
    tiles, size = tile_tokens.shape
    blocks = _blocks(key, store)
    channels = blocks.heads * head_dim
    norm, bias = weights.norm, weights.value_bias
    normalize = norm is not None and _norms(blocks)
    zx = zx.reshape(tokens, 2 * inner)

    window = read_slots(windows, packed.read_slot)
    ends = windows_of_tiles(lambda index: zx[index][..., inner:], window, packed)
    context = jnp.where(packed.tiles.first[:, None, None], window[packed.tile_row], jnp.roll(ends, 1, axis=0))
    windows = write_slots(windows, ends, packed.tiles.write_slot)

    count = valid.sum(axis=1, dtype=jnp.int32)
    # Tiles without tokens repeat the place of the tile before: nothing is moved for them.
    start = lax.cummax(jnp.where(count > 0, tile_tokens[:, 0], 0)).astype(jnp.int32)
    fetched = min(size + ALIGNED, tokens)
    base = jnp.minimum(start // ALIGNED, (tokens - fetched) // ALIGNED)
    first, read, write, slot_in, slot_out = slots_of_tiles(packed.tiles)
    log_decay, strength = (
        jnp.where(valid[..., None], v[tile_tokens], 0).astype(F32).swapaxes(1, 2) for v in (log_decay, strength)
    )
    taps = jnp.concatenate([weights.value_taps.T, jnp.zeros((1, inner)) if bias is None else bias[None]]).astype(F32)

    def half(first_block):  # of zx: z, or x
        window = pl.Element(fetched), pl.Element(channels)
        return pl.BlockSpec(window, lambda h, i, base, *_: (base[i] * ALIGNED, (first_block + h) * channels))

    def per_channel(count):
        return pl.BlockSpec((count, channels), lambda h, i, *_: (0, h))

    per_group = pl.BlockSpec((1, size, blocks.groups * state), lambda h, i, *_: (i, 0, blocks.block_of_groups(h)))
    slot = (1, blocks.heads, head_dim, state)
    settings = {"blocks": blocks, "head_dim": head_dim, "width": width, "eps": gates.eps}
    y, store = pl.pallas_call(
        functools.partial(_kernel, **settings, normalize=normalize, norm_before_gate=gates.norm_before_gate),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=8,
            grid=(blocks.count, tiles),
            in_specs=[
                half(0),
                half(blocks.count),
                pl.BlockSpec((1, CONTEXT, channels), lambda h, i, *_: (i, 0, h)),
                per_channel(width + 1),
                per_group,
                per_group,
                pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0)),
                pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0)),
                per_channel(1),
                per_channel(1),
                pl.BlockSpec((1, 1, size), lambda h, i, *_: (i, 0, 0)),
                pl.BlockSpec(slot, lambda h, i, *scalars: (scalars[-2][i], h, 0, 0)),
            ],
            out_specs=[
                pl.BlockSpec(memory_space=pl.ANY),
                pl.BlockSpec(slot, lambda h, i, *scalars: (scalars[-1][i], h, 0, 0)),
            ],
            scratch_shapes=[
                pltpu.VMEM(slot[1:], F32),
                pltpu.VMEM((channels // LANES, CONTEXT + fetched + size, LANES), F32),
                pltpu.VMEM((1, size, channels), zx.dtype),
                pltpu.VMEM((1, size, channels), F32),
                pltpu.VMEM((channels // LANES, ALIGNED, LANES), F32),
                pltpu.VMEM((size + ALIGNED, channels), zx.dtype),
                pltpu.SemaphoreType.DMA,
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct((tokens, inner), zx.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={19: 1},
        # Blocks of heads access disjoint parts of every slot (the null slot included) and of every token.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM_BYTES
        ),
        cost_estimate=_cost(zx, key, store, blocks, tiles, size, fetched),
        interpret=interpret,
        name="gated_scan",
    )(
        *(base, start, count, first, read, write, slot_in, slot_out),
        zx,
        zx,
        jnp.pad(context, ((0, 0), (CONTEXT + 1 - width, 0), (0, 0))),
        taps,
        query.reshape(tokens, groups * state)[tile_tokens],
        key.reshape(tokens, groups * state)[tile_tokens],
        log_decay,
        strength,
        jnp.repeat(weights.skip.astype(F32), head_dim)[None],
        (jnp.ones(inner) if norm is None else norm).astype(F32)[None],
        valid.astype(F32)[:, None],
        store,
    )
    if norm is not None and not normalize:
        y = rms_norm(y, norm, groups=groups, eps=gates.eps)
    # Tokens outside all tiles are not written.
    return jnp.where((jnp.arange(tokens) < count.sum())[:, None], y, 0), store, windows


def _blocks(key, store) -> HeadBlocks:
    heads, head_dim, state = store.shape[1:]
    return blocks_in_lanes(heads, key.shape[1], head_dim, state, F32, block_bytes=BLOCK_BYTES)


def _norms(blocks: HeadBlocks) -> bool:
    """Returns whether a block contains whole groups of the norm."""
    return blocks.heads >= blocks.repeats


def _kernel(
    base, start, count, first, read, write, _slot_in, _slot_out,
    z, x, context, taps, query, key, log_decay, strength, skip, norm, real, state_in, y, state_out,
    carry, wide, values, scanned, left, leaving, sent,
    *, blocks: HeadBlocks, head_dim: int, width: int, eps: float, normalize: bool, norm_before_gate: bool,
):  # fmt: skip
    """Computes one tile and block of heads.

    `wide` holds z and x so that loads may begin at any row. `values` is x after the convolution; `scanned` is the
    scan's output. `left` is the previous tile's part of an unfinished piece; `leaving` are the pieces in transfer.
    """
    block, tile, tiles = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    channels = values.shape[2]

    def pieces(tile, act):
        """Applies `act` to the transfer of each piece that a tile sends."""
        number = lax.div(lax.rem(start[tile], ALIGNED) + count[tile] + ALIGNED - 1, ALIGNED)

        def one(i, nothing):
            piece = leaving.at[pl.ds(pl.multiple_of(i * ALIGNED, ALIGNED), ALIGNED), :]
            row = pl.multiple_of((lax.div(start[tile], ALIGNED) + i) * ALIGNED, ALIGNED)
            place = y.at[pl.ds(row, ALIGNED), pl.ds(pl.multiple_of(block * channels, LANES), channels)]
            act(pltpu.make_async_copy(piece, place, sent))
            return nothing

        lax.fori_loop(0, jnp.where(count[tile] > 0, number, 0), one, 0)

    def wait_for(tile):
        pieces(tile, lambda piece: piece.wait())

    @pl.when(first[tile] > 0)
    def _():
        # A select, not a product: the null slot may hold NaN.
        carry[...] = jnp.where(read[tile] > 0, state_in[0].astype(F32), 0)

    @pl.when(count[tile] > 0)
    def _():
        at = start[tile] - base[tile] * ALIGNED
        _convolve(x, context, taps, wide, values, at, width=width)
        inputs = query, key, values, log_decay, strength, skip, real
        scan_tile(inputs, scanned, carry, state_out.dtype, blocks=blocks, head_dim=head_dim)
        groups = blocks.groups if normalize else 0
        scales = _gate(z, wide, scanned, at, groups=groups, eps=eps, norm_before_gate=norm_before_gate)

        @pl.when(tile > 0)
        def _():
            wait_for(tile - 1)

        _place(scanned, scales, norm, wide, left, leaving, lax.rem(start[tile], ALIGNED), count[tile])
        pieces(tile, lambda piece: piece.start())

    @pl.when((count[tile] == 0) & (tile > 0))
    def _():
        wait_for(tile - 1)

    @pl.when(tile == tiles - 1)
    def _():
        wait_for(tile)

    @pl.when(write[tile] > 0)
    def _():
        state_out[0] = carry[...].astype(state_out.dtype)


def _lay_out(v, wide, column):
    """Stores 128 lanes of z or x [rows, channels] in `wide`, where loads may begin at any row; row r at CONTEXT + r."""
    wide[column, CONTEXT : CONTEXT + v.shape[0]] = v[:, _lanes(column)].astype(F32)


def _lanes(column):
    return slice(column * LANES, (column + 1) * LANES)


def _silu(v, held):
    """Returns SiLU. If `held` has 16 bits, it is computed by tanh, which is one instruction; a quotient takes many."""
    return v * (0.5 + 0.5 * jnp.tanh(0.5 * v)) if jnp.dtype(held).itemsize == 2 else jax.nn.silu(v)


def _convolve(x, context, taps, wide, values, at, *, width):
    """The tile's tokens begin at row `at` of x. Entries of `values` for padding are arbitrary."""
    size = values.shape[1]
    for column in range(wide.shape[0]):
        lanes = _lanes(column)
        _lay_out(x, wide, column)
        wide[column, pl.ds(at, CONTEXT)] = context[0, :, lanes].astype(F32)
        seen = [wide[column, pl.ds(CONTEXT - width + 1 + i + at, size)] for i in range(width)]
        total = sum(taps[i : i + 1, lanes] * seen[i] for i in range(width)) + taps[width:, lanes]
        values[0, :, lanes] = _silu(total, values.dtype).astype(values.dtype)


def _gate(z, wide, scanned, at, *, groups, eps, norm_before_gate):
    """Gates the output of the scan in place. Returns the factors of the norm by group; none without groups."""
    size, columns = scanned.shape[1], wide.shape[0]
    squares = [jnp.zeros((size, LANES), F32) for _ in range(groups)]
    for column in range(columns):
        lanes = _lanes(column)
        _lay_out(z, wide, column)
        value = scanned[0, :, lanes]
        gated = value * _silu(wide[column, pl.ds(CONTEXT + at, size)], z.dtype)
        scanned[0, :, lanes] = gated
        if groups:
            squares[column * groups // columns] += jnp.square(value if norm_before_gate else gated)
    channels = columns * LANES // max(groups, 1)
    return [lax.rsqrt(total.sum(axis=1, keepdims=True) / channels + eps) for total in squares]


def _place(scanned, scales, norm, wide, left, leaving, into, count):
    """Normalizes a tile's `count` tokens and stores them in `leaving`, from row `into` on."""
    size, columns = scanned.shape[1], wide.shape[0]
    unfinished = pl.multiple_of(lax.div(into + count, ALIGNED) * ALIGNED, ALIGNED)
    for column in range(columns):
        lanes = _lanes(column)
        out = scanned[0, :, lanes]
        if scales:
            out = out * scales[column * len(scales) // columns] * norm[:, lanes]
        wide[column, :ALIGNED] = left[column]
        wide[column, pl.ds(into, size)] = out
        leaving[:, lanes] = wide[column, : size + ALIGNED].astype(leaving.dtype)
        left[column] = wide[column, pl.ds(unfinished, ALIGNED)]


def _cost(zx, key, store, blocks: HeadBlocks, tiles: int, size: int, fetched: int) -> pl.CostEstimate:
    inner, (heads, head_dim, state) = zx.shape[1] // 2, store.shape[1:]
    tokens = tiles * size
    flops = 2 * tokens * heads * (size * head_dim + 2 * head_dim * state) + 2 * tokens * size * state * blocks.count
    per_token = inner * zx.dtype.itemsize + 4 * heads + 2 * blocks.count * blocks.groups * state * key.dtype.itemsize
    return pl.CostEstimate(
        flops=flops,
        transcendentals=tokens * (heads * size + 2 * inner),
        # Assumes that every tile has tokens and writes a state. Most do not, but one row at least is read and written.
        bytes_accessed=tiles * (fetched + CONTEXT) * 2 * inner * zx.dtype.itemsize
        + tokens * per_token
        + 2 * tiles * heads * head_dim * state * store.dtype.itemsize,
    )
