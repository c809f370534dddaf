"""Shared code of the Triton kernels: blocks (powers of two in every dimension), masked accesses and products.

Stores and tails are input and output of a kernel in one buffer. Accesses to slot 0 and tail 0 are masked: kernels
neither read nor write them. Rows run side by side, which is why no row may write a slot that another row reads
(`kernels_pallas.slots`).
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool

from kernels_pallas.places import Tiles

CHANNELS = 32  # of a head in one program, at most
LEAST = 16  # the minimum size of every dimension of Triton's products
LEAST_OF_PIECE = 8  # the minimum size of a key's pieces: smaller ones would be a program of hundreds of pieces


def is_power_of_two(n: int) -> bool:
    """Returns whether n is 1, 2, 4, ..."""
    return n > 0 and n & (n - 1) == 0


def power_of_two_in(n: int, most: int) -> int:
    """Returns the largest power of two that divides n and is at most `most`; 1 if `most` is less."""
    return math.gcd(n, 1 << max(most, 1).bit_length() - 1)


def pieces(size: int) -> list[Any]:
    """Cuts an axis into the fewest equal slices whose size is a power of two. A block holds one slice."""
    width = power_of_two_in(size, size)
    return [pl.ds(first, width) for first in range(0, size, width)]


def product_with(values: list[Array], key: list[Array]) -> Array:
    """Multiplies the last axis with a key, in float32 on ordinary units; both are in pieces."""
    return sum(
        jnp.sum(piece * (one if piece.ndim == 1 else one[None, :]), axis=-1)
        for piece, one in zip(values, key, strict=True)
    )  # type: ignore[return-value]


def decayed(cut: list[Array], log_decay: list[Array]) -> list[Array]:
    """Multiplies the last axis, in pieces, with decays: one of each channel, in equal pieces, or one of them all."""
    logs = log_decay if len(log_decay) == len(cut) else log_decay * len(cut)
    decays = [jnp.exp(log) for log in logs]
    return [
        piece * (decay[None, :] if decay.ndim < piece.ndim and decay.ndim else decay)
        for piece, decay in zip(cut, decays, strict=True)
    ]


def offsets_overflow(array) -> bool:
    """Returns whether an offset may overflow: Triton counts elements of arrays up to 4 GiB in signed 32 bits."""
    return array.size >= 1 << 31 and array.size * array.dtype.itemsize <= 1 << 32


def unsupported(keys: int, *stores) -> str | None:
    """Returns why kernels whose keys, of this size, go in pieces do not take these trees of stores; None if they do."""
    if any(map(offsets_overflow, jax.tree.leaves(stores))):
        return "offsets into the store do not fit in 32 bits"
    if keys % LEAST_OF_PIECE:
        return f"keys have a size of {keys}, not a multiple of {LEAST_OF_PIECE}"
    return None


def load_if(condition: Bool[Array, "..."], ref, *shape: int):
    """Loads `ref` (a reference to a block of `shape`); zeros without an access where `condition` is false."""
    return plt.load(ref, mask=jnp.broadcast_to(condition, shape), other=jnp.zeros(shape, ref.dtype))


def any_nonzero(ref, *lead: Array):
    """Returns whether any number of ref[*lead, :] is not 0."""
    size = ref.shape[-1]
    index = jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32)
    values = plt.load(ref.at[(*lead, index)], mask=index < size, other=jnp.zeros((), ref.dtype))
    return jnp.max((values != 0).astype(jnp.int32), axis=0) > 0


def store_if(condition: Bool[Array, "..."], ref, value: Array) -> None:
    """Writes `value` where `condition` is true."""
    plt.store(ref, value, mask=jnp.broadcast_to(condition, value.shape))


def update_call(kernel, name: str, grid, inputs, y, stores, *, interpret: bool, warps: int = 4) -> tuple[Any, ...]:
    """Runs a kernel of (inputs, stores, y, stores), the stores in place; returns y and the stores.

    inputs, stores: arrays, trees of them, and None.
    """
    first, held = len(jax.tree.leaves(inputs)), len(jax.tree.leaves(stores))
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=(y, *jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), stores)),
        input_output_aliases={first + n: 1 + n for n in range(held)},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs, *stores)


def pass_states_on(call, name: str, grid, part, tiles: Tiles, operands, added, store) -> Sequence[Array]:
    """Passes the states on from tile to tile, as a kernel: from slots, through all tiles, to slots.

    Args:
        call: `pallas_call` with the options that kernels of an operation share.
        part: `part(*operands)` returns the indices of a program's part in a state, its shape, and a function that
            returns the factor of a tile on the part before it.
        added: what each tile adds to a state, float32, by tile.
    Returns:
        The state before each tile, in the memory of `added`, and the store.
    """

    def kernel(first, read_slot, write_slot, operands, added, store_in, begun, store_out):
        here, shape, decay = part(*operands)

        def one_tile(tile: Array, state: Array) -> Array:
            source, fresh = plt.load(read_slot.at[tile]), plt.load(first.at[tile]) > 0
            slot = load_if(source > 0, store_in.at[(source, *here)], *shape).astype(jnp.float32)
            state = jnp.where(fresh, slot, state)
            gained = plt.load(added.at[(tile, *here)])
            plt.store(begun.at[(tile, *here)], state)
            # Rounded to the store's dtype, so that dividing a row's tiles over several calls does not change results.
            stored = (state * decay(tile) + gained).astype(store_out.dtype)
            target = plt.load(write_slot.at[tile])
            store_if(target > 0, store_out.at[(target, *here)], stored)
            return stored.astype(jnp.float32)

        lax.fori_loop(0, added.shape[0], one_tile, jnp.zeros(shape, jnp.float32))

    # The first tile has no previous tile: unless it begins a row, it starts from zeros.
    slots = tiles.first.at[0].set(True), jnp.where(tiles.first, tiles.read_slot, 0), tiles.write_slot
    return call(
        kernel,
        grid=grid,
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (added, store)],
        input_output_aliases={3 + len(operands): 0, 4 + len(operands): 1},
        name=name,
    )(*(v.astype(jnp.int32) for v in slots), operands, added, store)


def dot(left, right, dtype, *, tensor_cores=False):
    """Returns a product summed in float32, of operands rounded to the dtype; with float32 in full precision.

    With `tensor_cores`, float32 products run on tensor cores, as three TF32 products, which lose only the last digits;
    other units would need a register for every product. Pallas' interpreter does not support this.
    """
    precision: Any = lax.Precision.DEFAULT
    if dtype == jnp.float32:
        precision = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if tensor_cores else lax.Precision.HIGHEST
    return jnp.dot(
        left.astype(dtype), right.astype(dtype), precision=precision, preferred_element_type=jnp.float32
    )  # fmt: skip
