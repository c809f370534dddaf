"""A scan that does not erase as three Triton kernels, so that the tiles of a single prompt can fill a GPU.

1. Computes what each tile adds to a state.
2. Passes the states on from tile to tile.
3. Computes each tile's outputs from the state before the tile.

Kernels 1 and 3 process all tiles in parallel; a program takes some channels of one head and one tile, in blocks of
`TOKENS` tokens, by products of operands in the value's dtype, summed in float32 (float32 inputs keep full precision).
Kernel 2 only adds, and processes the tiles in order (Dao and Gu, 2024, section 6).
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array

from kernels_pallas.triton_blocks import CHANNELS, dot, load_if, pass_states_on, power_of_two_in

F32 = jnp.float32
TOKENS = 64  # of a tile in one product, at most
SLICE = 16  # channels of a head in one program of the second kernel


def scan(entry, store, tiles, *, skip, interpret):
    query, key, value, _, strength = entry
    count, size, heads, head_dim = value.shape
    block, part = power_of_two_in(size, TOKENS), power_of_two_in(head_dim, CHANNELS)
    sizes = {"block": block, "part": part, "repeats": entry.repeats}
    # The log of the decay from a block's start.
    by_block = entry.masked().log_decay.astype(F32).reshape(count, size // block, block, heads)
    decay = jnp.cumsum(by_block, axis=2).reshape(count, size, heads).swapaxes(1, 2)
    # Whether a token is real depends on all heads, but a program sees only one.
    real, strength = entry.real, strength.astype(F32).swapaxes(1, 2)
    call = functools.partial(
        pl.pallas_call, compiler_params=plt.CompilerParams(num_warps=4, num_stages=1), interpret=interpret
    )
    states = jax.ShapeDtypeStruct((count, *store.shape[1:]), F32)
    by_tile = (heads, head_dim // part, count)
    added = call(functools.partial(_added, **sizes), grid=by_tile, out_shape=states, name="recurrence_scan_added")(
        real, value, strength, decay, key
    )

    across = by_block.sum(axis=(1, 2))  # [tiles, heads], the log of the decay over a tile
    part_of_state, grid = functools.partial(_slice, size=store.shape[3]), (heads, head_dim // SLICE)
    begun, store = pass_states_on(
        call, "recurrence_scan_passed_on", grid, part_of_state, tiles, (across,), added, store
    )  # fmt: skip
    y = call(
        functools.partial(_outputs, **sizes),
        grid=by_tile,
        out_shape=jax.ShapeDtypeStruct(value.shape, value.dtype),
        name="recurrence_scan_outputs",
    )(real, value, strength, decay, key, query, skip, begun)
    return y, store


def _added(real, value, strength, decay, key, out, *, block: int, part: int, repeats: int):
    """Computes what a tile adds to the state before it."""
    state = jnp.zeros((part, key.shape[3]), F32)
    head, channels, tile = (pl.program_id(axis) for axis in range(3))
    here = pl.ds(channels * part, part)
    for place in range(value.shape[1] // block):
        tokens = _Tokens(tile, head, here, part, place * block, block)
        state = tokens.carry(state, tokens.values(real, value), tokens.inner(real, key, repeats), strength, decay)
    plt.store(out.at[tile, head, here, :], state)


def _slice(across, *, size: int):
    """Some channels of a head, for `pass_states_on`."""
    head, channels = pl.program_id(0), pl.program_id(1)
    here = head, pl.ds(channels * SLICE, SLICE), slice(None)
    return here, (SLICE, size), lambda tile: jnp.exp(plt.load(across.at[tile, head]))


def _outputs(real, value, strength, decay, key, query, skip, begun, y, *, block: int, part: int, repeats: int):
    """Computes a tile's outputs from the state before the tile."""
    head, channels, tile = (pl.program_id(axis) for axis in range(3))
    here = pl.ds(channels * part, part)
    state, weight = plt.load(begun.at[tile, head, here, :]), 0.0 if skip is None else plt.load(skip.at[head])
    product = functools.partial(dot, dtype=value.dtype)
    row, column = (lax.broadcasted_iota(jnp.int32, (block, block), axis) for axis in (0, 1))
    blocks = value.shape[1] // block
    for place in range(blocks):
        tokens = _Tokens(tile, head, here, part, place * block, block)
        values, keys, queries = tokens.values(real, value), *(tokens.inner(real, v, repeats) for v in (key, query))
        strengths, sums = tokens.column(strength), tokens.column(decay)
        # Masked before exp: above the diagonal it could overflow.
        within = jnp.exp(jnp.where(row >= column, sums[:, None] - sums[None, :], -jnp.inf))
        inside = product(product(queries, keys.T) * within * strengths[None, :], values)
        before = product(queries, state.T) * jnp.exp(sums)[:, None]
        out = inside + before + values.astype(F32) * weight
        plt.store(y.at[tile, tokens.span, head, here], out.astype(y.dtype))
        if place + 1 < blocks:
            state = tokens.carry(state, values, keys, strength, decay)


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """A block of a tile's tokens, as one head sees them."""

    tile: Array
    head: Array
    channels: Any
    """A slice of `width`."""
    width: int
    start: int
    count: int

    @property
    def span(self) -> Any:
        return pl.ds(self.start, self.count)

    def _live(self, real):
        # Padding may hold NaN, and 0 * NaN is NaN: its values are masked.
        return plt.load(real.at[self.tile, self.span])[:, None]

    def values(self, real, value):
        """[count, channels]"""
        here = value.at[self.tile, self.span, self.head, self.channels]
        return load_if(self._live(real), here, self.count, self.width)

    def inner(self, real, v, repeats):
        """Key or query of the head's group, [count, state]."""
        group = lax.div(self.head, repeats)
        return load_if(self._live(real), v.at[self.tile, self.span, group, :], self.count, v.shape[3])

    def column(self, v):
        """[count], of the strength or the decay."""
        return plt.load(v.at[self.tile, self.head, self.span])

    def carry(self, state, values, keys, strength, decay):
        """Returns the state after these tokens."""
        strengths, sums = self.column(strength), self.column(decay)
        last = plt.load(decay.at[self.tile, self.head, jnp.int32(self.start + self.count - 1)])
        to_end = values.astype(F32) * (strengths * jnp.exp(last - sums))[:, None]
        return state * jnp.exp(last) + dot(to_end.T, keys, values.dtype)
