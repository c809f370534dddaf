"""The pipelines of TPU kernels whose states are in slots: through the tiles of rows, and through rows of a few steps.

Prefetched slot numbers select the blocks that the pipeline fetches and writes; the store is input and output in one
buffer. It fetches the next row's state while it writes this one's, which is why no row may write a slot that another
row reads (`kernels_pallas.slots`). Writes to slot 0 are not skipped, because the null slot may hold anything.

A kernel gives the part that differs: its inputs with their blocks, and a function that computes one grid step.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int

from kernels_pallas.places import Rows, Tiles

F32 = jnp.float32


def scan(
    compute, inputs, output, store, tiles: Tiles, *, real, block, axis=0, scalars=(), padding=None, memory=(),
    vmem_bytes=None, cost, interpret, name,
):  # fmt: skip
    """Runs a kernel on the grid (blocks of a state, tiles), the state in VMEM from a row's first tile to its last.
    Returns the output and the store.

    Args:
        compute: `compute(place, inputs, y, carry, stored, *memory)` reads the blocks of the inputs, writes the block of
            the output, and updates `carry`, the block of a state in float32. `place` is (block, tile), `stored` the
            dtype of the store.
        inputs: arrays and their `BlockSpec`s, whose index maps begin with (block, tile); `output` as a shape.
        real: tokens that are not padding [tiles, tile_size].
        block: the shape of a block of a state.
        axis: the axis of a state that is divided into blocks.
        scalars: numbers of tiles that index maps take, as a tuple, after (block, tile), and the functions before their
            inputs.
        padding: called in place of `compute` for tiles of padding; None: their output is zeros.
        memory: further scratch shapes.
        vmem_bytes: limit of VMEM; the compiler's default if None.
    """
    first, read, write, fetched, flushed = slots_of_tiles(tiles)

    def slot(number):
        def index(h, i, scalars, of_tiles, of_blocks):
            return (of_blocks[number][i], *(h if n == axis else 0 for n in range(len(block))))

        return pl.BlockSpec((1, *block), index)

    kernel = functools.partial(_scan_kernel, compute=compute, padding=padding or _zeros)
    of_tiles = first, read, write, real.any(axis=1).astype(jnp.int32)
    return call_in_place(
        kernel, inputs, output, [(store, slot(0), slot(1))], (tuple(scalars), of_tiles, (fetched, flushed)),
        grid=(store.shape[1 + axis] // block[axis], len(first)),
        memory=[pltpu.VMEM(block, F32), *memory], vmem_bytes=vmem_bytes, cost=cost, interpret=interpret, name=name,
    )  # fmt: skip


def slots_of_tiles(tiles: Tiles) -> list[Int[Array, " tiles"]]:
    """Returns the scalars of a kernel over tiles: first, read slot, write slot, slots of the input and output blocks.

    A tile that reads nothing selects the block that the previous tile read; a tile that writes nothing selects the
    block that the next one writes. The pipeline moves a block only when its number changes.
    """
    # The first tile has no previous tile: unless it begins a row, it starts from zeros.
    first, read, write = tiles.first.at[0].set(True), jnp.where(tiles.first, tiles.read_slot, 0), tiles.write_slot
    number = jnp.arange(len(first))
    fetched = read[lax.cummax(jnp.where(first, number, 0))]
    following = lax.cummin(jnp.where(write > 0, number, len(first) - 1), reverse=True)
    return [v.astype(jnp.int32) for v in (first, read, write, fetched, write[following])]


def _zeros(place, inputs, y, *others):
    y[...] = jnp.zeros(y.shape, y.dtype)


def _scan_kernel(scalars, of_tiles, of_blocks, inputs, stores, y, new_stores, carry, *memory, compute, padding):
    (tile_first, read_slot, write_slot, live), (state_in,), (state_out,) = of_tiles, stores, new_stores
    tile = pl.program_id(1)
    block = (pl.program_id(0), tile), (*scalars, *inputs), y, carry, state_out.dtype, *memory

    @pl.when(tile_first[tile] > 0)
    def _():
        # A select, not a product: the null slot may hold NaN.
        carry[...] = jnp.where(read_slot[tile] > 0, state_in[0].astype(F32), 0)

    pl.when(live[tile] > 0)(lambda: compute(*block))
    pl.when(live[tile] == 0)(lambda: padding(*block))

    @pl.when(write_slot[tile] > 0)
    def _():
        state_out[0] = carry[...].astype(state_out.dtype)


def update(compute, inputs, output, store, places: Rows, *, real, heads: int, cost, interpret, name):
    """Runs a kernel on the grid (blocks of heads, rows, steps), steps innermost; each step's state goes to its slot.
    Returns the output and the store.

    Consecutive rows on slot 0 (padding) select the same block, so the pipeline moves nothing for them.

    Args:
        compute: `compute(block, inputs, y, before, keep)` reads the blocks of the inputs and writes the block of the
            output. `before(heads)` returns the states of heads of the block before the step, in float32;
            `keep(head, state)` stores the state of a head after it, and returns the state in float32 as it was rounded.
            It is not called for padding, whose output is zeros and which leaves states as they are.
        inputs: as of `scan`; index maps begin with (block, row, step). `output` likewise.
        real: steps that are not padding [rows, steps].
        heads: heads of a block.
    """
    (rows, steps), block = places.write_slot.shape, (heads, *store.shape[2:])

    def slot(index):
        return pl.BlockSpec((1, *block), lambda h, i, t, *scalars: (index(i, t, *scalars), h, 0, 0))

    kernel = functools.partial(_update_kernel, compute=compute, steps=steps)
    scalars = (
        places.read_slot.astype(jnp.int32),
        # One axis: in scalar memory, the last of two axes is padded to 128.
        places.write_slot.astype(jnp.int32).reshape(-1),
        real.astype(jnp.int32).reshape(-1),
    )
    fetched, flushed = slot(lambda i, t, read, *_: read[i]), slot(lambda i, t, read, write, _: write[i * steps + t])
    return call_in_place(
        kernel, inputs, output, [(store, fetched, flushed)], scalars, grid=(store.shape[1] // heads, rows, steps),
        memory=[pltpu.VMEM(block if steps > 1 else (8, 128), F32)], cost=cost, interpret=interpret, name=name,
    )  # fmt: skip


def _update_kernel(read_slot, write_slot, real, inputs, stores, y, new_stores, carry, *, compute, steps: int):
    (state_in,), (state_out,) = stores, new_stores
    block, row, step = (pl.program_id(axis) for axis in range(3))
    index = row * steps + step
    has_state = read_slot[row] > 0

    def start(heads):
        # A select, not a product: the null slot may hold NaN.
        return jnp.where(has_state, state_in[0, heads].astype(F32), 0)

    if steps > 1:

        @pl.when(step == 0)
        def _():
            carry[...] = start(slice(None))

    def before(heads):
        return carry[heads] if steps > 1 else start(heads)

    def keep(head, state):
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = state.astype(state_out.dtype)
        state_out[0, head] = stored
        state = stored.astype(F32)
        if steps > 1:
            carry[head] = state
        return state

    @pl.when(real[index] > 0)
    def _():
        compute(block, inputs, y, before, keep)

    @pl.when(real[index] == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when((real[index] == 0) & (write_slot[index] > 0))
    def _():
        # A loop, because padding is rare and unrolled code for it would be a fifth of the program.
        def copy(head, _):
            state_out[0, head] = before(head).astype(state_out.dtype)

        lax.fori_loop(0, state_out.shape[1], copy, None)


def call_in_place(
    kernel, inputs, output, stores, scalars, *, grid, memory, parallel=True, vmem_bytes=None, cost, interpret, name
):
    """Runs a kernel of (*scalars, inputs, stores, output, stores, *memory); returns the output and the stores.

    Args:
        scalars: arrays, or trees of them, which index maps take after the place in the grid.
        stores: arrays that are updated in place, with the `BlockSpec`s of what is read and of what is written.
        parallel: blocks along the first axis of the grid access disjoint parts of every slot (the null slot included).
    """
    (shape, y_blocks), (arrays, blocks) = output, zip(*inputs, strict=True)
    held, fetched, flushed = zip(*stores, strict=True)
    order: list[Any] = ["parallel" if parallel else "arbitrary"] + ["arbitrary"] * (len(grid) - 1)
    first = len(jax.tree.leaves((scalars, arrays)))
    y, updated = pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=(blocks, fetched),
            out_specs=(y_blocks, flushed),
            scratch_shapes=memory,
        ),
        out_shape=(shape, tuple(jax.ShapeDtypeStruct(v.shape, v.dtype) for v in held)),
        input_output_aliases={first + n: 1 + n for n in range(len(held))},
        compiler_params=pltpu.CompilerParams(dimension_semantics=order, vmem_limit_bytes=vmem_bytes),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(*scalars, arrays, held)
    return y, *updated
