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

from kernels_pallas import tpu_pipeline
from kernels_pallas.causal_conv1d.xla import windows_of_tiles
from kernels_pallas.gated_norm.xla import rms_norm
from kernels_pallas.recurrence.scan.pallas_tpu import BLOCK_BYTES
from kernels_pallas.recurrence.scan.tpu_tile import scan_tile
from kernels_pallas.slots import read_slots, write_slots
from kernels_pallas.tpu_blocks import F32, LANES, HeadBlocks, blocks_in_lanes

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
    log_decay, strength = (
        jnp.where(valid[..., None], v[tile_tokens], 0).astype(F32).swapaxes(1, 2) for v in (log_decay, strength)
    )
    taps = jnp.concatenate([weights.value_taps.T, jnp.zeros((1, inner)) if bias is None else bias[None]]).astype(F32)

    def half(first_block):  # of zx: z, or x
        window = pl.Element(fetched), pl.Element(channels)
        return pl.BlockSpec(window, lambda h, i, given, *_: (given[0][i] * ALIGNED, (first_block + h) * channels))

    def per_channel(count):
        return pl.BlockSpec((count, channels), lambda h, i, *_: (0, h))

    per_group = pl.BlockSpec((1, size, blocks.groups * state), lambda h, i, *_: (i, 0, blocks.block_of_groups(h)))
    per_head = pl.BlockSpec((1, blocks.heads, size), lambda h, i, *_: (i, h, 0))
    settings = {"blocks": blocks, "head_dim": head_dim, "width": width, "eps": gates.eps}
    inputs = [
        (zx, half(0)),
        (zx, half(blocks.count)),
        (
            jnp.pad(context, ((0, 0), (CONTEXT + 1 - width, 0), (0, 0))),
            pl.BlockSpec((1, CONTEXT, channels), lambda h, i, *_: (i, 0, h)),
        ),
        (taps, per_channel(width + 1)),
        (query.reshape(tokens, groups * state)[tile_tokens], per_group),
        (key.reshape(tokens, groups * state)[tile_tokens], per_group),
        (log_decay, per_head),
        (strength, per_head),
        (jnp.repeat(weights.skip.astype(F32), head_dim)[None], per_channel(1)),
        ((jnp.ones(inner) if norm is None else norm).astype(F32)[None], per_channel(1)),
        (valid.astype(F32)[:, None], pl.BlockSpec((1, 1, size), lambda h, i, *_: (i, 0, 0))),
    ]
    y, store = tpu_pipeline.scan(
        functools.partial(_compute, **settings, normalize=normalize, norm_before_gate=gates.norm_before_gate),
        inputs,
        (jax.ShapeDtypeStruct((tokens, inner), zx.dtype), pl.BlockSpec(memory_space=pl.ANY)),
        store,
        packed.tiles,
        real=valid,
        block=(blocks.heads, head_dim, state),
        scalars=(base, start, count),
        padding=_wait,
        memory=[
            pltpu.VMEM((channels // LANES, CONTEXT + fetched + size, LANES), F32),
            pltpu.VMEM((1, size, channels), zx.dtype),
            pltpu.VMEM((1, size, channels), F32),
            pltpu.VMEM((channels // LANES, ALIGNED, LANES), F32),
            pltpu.VMEM((size + ALIGNED, channels), zx.dtype),
            pltpu.SemaphoreType.DMA,
        ],
        vmem_bytes=VMEM_BYTES,
        cost=_cost(zx, key, store, blocks, tiles, size, fetched),
        interpret=interpret,
        name="gated_scan",
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


def _compute(
    place, inputs, y, carry, stored, wide, values, scanned, left, leaving, sent,
    *, blocks: HeadBlocks, head_dim: int, width: int, eps: float, normalize: bool, norm_before_gate: bool,
):  # fmt: skip
    """Computes one tile and block of heads.

    `wide` holds z and x so that loads may begin at any row. `values` is x after the convolution; `scanned` is the
    scan's output. `left` is the previous tile's part of an unfinished piece; `leaving` are the pieces in transfer.
    """
    base, start, count, z, x, context, taps, query, key, log_decay, strength, skip, norm, real = inputs
    block, tile = place
    at = start[tile] - base[tile] * ALIGNED
    _convolve(x, context, taps, wide, values, at, width=width)
    inputs = query, key, values, log_decay, strength, skip, real
    scan_tile(inputs, scanned, carry, stored, blocks=blocks, head_dim=head_dim)
    groups = blocks.groups if normalize else 0
    scales = _gate(z, wide, scanned, at, groups=groups, eps=eps, norm_before_gate=norm_before_gate)
    sending = block, start, count, y, leaving, sent
    pl.when(tile > 0)(lambda: _each_piece(tile - 1, *sending, lambda piece: piece.wait()))
    _place(scanned, scales, norm, wide, left, leaving, lax.rem(start[tile], ALIGNED), count[tile])
    _each_piece(tile, *sending, lambda piece: piece.start())
    pl.when(tile == start.shape[0] - 1)(lambda: _each_piece(tile, *sending, lambda piece: piece.wait()))


def _wait(place, inputs, y, carry, stored, wide, values, scanned, left, leaving, sent):
    """Waits for what the previous tile sends."""
    (block, tile), (_, start, count, *_) = place, inputs
    sending = block, start, count, y, leaving, sent
    pl.when(tile > 0)(lambda: _each_piece(tile - 1, *sending, lambda piece: piece.wait()))


def _each_piece(tile, block, start, count, y, leaving, sent, act):
    """Applies `act` to the transfer of each piece that a tile sends."""
    number = lax.div(lax.rem(start[tile], ALIGNED) + count[tile] + ALIGNED - 1, ALIGNED)
    channels = leaving.shape[1]

    def one(i, nothing):
        piece = leaving.at[pl.ds(pl.multiple_of(i * ALIGNED, ALIGNED), ALIGNED), :]
        row = pl.multiple_of((lax.div(start[tile], ALIGNED) + i) * ALIGNED, ALIGNED)
        place = y.at[pl.ds(row, ALIGNED), pl.ds(pl.multiple_of(block * channels, LANES), channels)]
        act(pltpu.make_async_copy(piece, place, sent))
        return nothing

    lax.fori_loop(0, jnp.where(count[tile] > 0, number, 0), one, 0)


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
