"""The scan as one Triton kernel: each program takes some channels of one head through all tiles of one row.

The state stays in registers from a row's first tile to its last; it comes from its slot once and goes out after tiles
that ask for it, in place. Programs whose tile does not start a row have nothing to do and end at once. Accesses to slot
0 are masked: nothing is read, nothing is written.

A tile is worked off in blocks of `tokens` tokens (Dao and Gu, 2024, section 6), by products of operands in x's dtype,
summed in float32; with float32 inputs products keep full precision.

Rows run side by side, which is why no row may write a slot that another row reads (`kernels_pallas.slots`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton_blocks import is_power_of_two, load_if, offsets_overflow, power_of_two_in, store_if

F32 = jnp.float32
LEAST = 16  # what Triton's products ask of every dimension


def unsupported(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """Why this call cannot run, or None."""
    if 0 in (*x.shape, *b.shape):
        return "it is empty"
    if offsets_overflow(store):
        return "offsets into the store do not fit in 32 bits"
    if not is_power_of_two(b.shape[3]) or b.shape[3] < LEAST:
        return f"the state size is {b.shape[3]}, not a power of two of at least {LEAST}"
    for what, size in (("tiles", x.shape[1]), ("heads", x.shape[3])):
        if power_of_two_in(size, LEAST) < LEAST:
            return f"{what} have a size of {size}, not a multiple of {LEAST}"
    return None


def ssd_scan(
    x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot, interpret=False, tokens=64, channels=64, warps=4,
    stages=2,
):  # fmt: skip
    """See `api.ssd_scan`. `channels` (at most, of a head) go into one program of `warps` warps, `tokens` (at most) into
    one product; `stages` is Triton's depth of prefetching.
    """
    tiles, size, heads, head_dim = x.shape
    block, part = power_of_two_in(size, tokens), power_of_two_in(head_dim, channels)
    dt = dt.astype(F32)
    # The log of the decay from a block's start.
    by_block = (dt * a.astype(F32)).reshape(tiles, size // block, block, heads)
    decay = jnp.cumsum(by_block, axis=2).reshape(tiles, size, heads)

    # Without a row to carry on, the first tile starts from zeros.
    starts = tile_first.at[0].set(True)
    number = jnp.arange(tiles)
    following = lax.cummin(jnp.where(starts, number, tiles), reverse=True)  # the next start, from each tile on
    end = jnp.where(starts, jnp.append(following[1:], tiles), number)
    y, store = pl.pallas_call(
        functools.partial(_kernel, block=block, part=part, repeats=heads // b.shape[2]),
        grid=(heads, head_dim // part, tiles),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={10: 1},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="ssd_scan",
    )(
        end.astype(jnp.int32),
        jnp.where(tile_first, read_slot, 0).astype(jnp.int32),
        write_slot.astype(jnp.int32),
        # Which tokens are real is decided over all heads; a program sees one.
        (dt != 0).any(axis=2),
        x,
        dt.swapaxes(1, 2),
        decay.swapaxes(1, 2),
        b,
        c,
        d.astype(F32),
        store,
    )
    return y, store


def _kernel(
    end, read_slot, write_slot, real, x, dt, decay, b, c, d, state_in, y, state_out, *, block: int, part: int,
    repeats: int,
):  # fmt: skip
    head, channels, tile = (pl.program_id(axis) for axis in range(3))
    group = lax.div(head, repeats)
    size, state_size = x.shape[1], state_in.shape[3]
    here = pl.ds(channels * part, part)
    skip = plt.load(d.at[head])
    dot = functools.partial(_dot, dtype=x.dtype)
    row, column = (lax.broadcasted_iota(jnp.int32, (block, block), axis) for axis in (0, 1))

    def tokens(i, place, state):
        span = pl.ds(place * block, block)
        # Padding may hold NaN, and 0 * NaN is NaN: its values are not looked at.
        live = plt.load(real.at[i, span])[:, None]
        values = load_if(live, x.at[i, span, head, here], block, part)
        bt, ct = (load_if(live, v.at[i, span, group, :], block, state_size) for v in (b, c))
        steps, sums = plt.load(dt.at[i, head, span]), plt.load(decay.at[i, head, span])
        last = plt.load(decay.at[i, head, jnp.int32(place * block + block - 1)])
        # Masked before exp: above the diagonal it could overflow.
        within = jnp.exp(jnp.where(row >= column, sums[:, None] - sums[None, :], -jnp.inf))
        inside = dot(dot(ct, bt.T) * within * steps[None, :], values)
        before = dot(ct, state.T) * jnp.exp(sums)[:, None]
        out = inside + before + values.astype(F32) * skip
        plt.store(y.at[i, span, head, here], out.astype(y.dtype))
        to_end = values.astype(F32) * (steps * jnp.exp(last - sums))[:, None]
        return state * jnp.exp(last) + dot(to_end.T, bt)

    def one_tile(i, state):
        for place in range(size // block):
            state = tokens(i, place, state)
        # Rounded as it could be stored, so that cutting a row between tiles into several calls changes nothing.
        stored = state.astype(state_out.dtype)
        target = plt.load(write_slot.at[i])
        store_if(target > 0, state_out.at[target, head, here, :], stored)
        return stored.astype(F32)

    last_tile = plt.load(end.at[tile])

    @pl.when(last_tile > tile)
    def _():
        source = plt.load(read_slot.at[tile])
        state = load_if(source > 0, state_in.at[source, head, here, :], part, state_size).astype(F32)
        lax.fori_loop(tile, last_tile, one_tile, state)


def _dot(left, right, dtype):
    """A product summed in float32, of operands rounded to the dtype; with float32 in full precision."""
    precision = lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT
    return jnp.dot(left.astype(dtype), right.astype(dtype), precision=precision, preferred_element_type=F32)
