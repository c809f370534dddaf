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
    compute, inputs, output, store, tiles: Tiles, *, real, block, axis=0, memory=(), vmem_bytes=None, cost, interpret,
    name,
):  # fmt: skip
    """Runs a kernel on the grid (blocks of a state, tiles), the state in VMEM from a row's first tile to its last.
    Returns the output and the store.

    Args:
        compute: `compute(tile, inputs, y, carry, stored, *memory)` reads the blocks of the inputs, writes the block of
            the output, and updates `carry`, the block of a state in float32. `stored` is the dtype of the store. It is
            not called for tiles of padding, whose output is zeros.
        inputs: arrays and their `BlockSpec`s, whose index maps begin with (block, tile); `output` as a shape.
        real: tokens that are not padding [tiles, tile_size].
        block: the shape of a block of a state.
        axis: the axis of a state that is divided into blocks.
        memory: further scratch shapes.
        vmem_bytes: limit of VMEM; the compiler's default if None.
    """
    first, read, write, fetched, flushed = slots_of_tiles(tiles)

    def slot(scalar):
        def index(h, i, *scalars):
            return (scalars[scalar][i], *(h if n == axis else 0 for n in range(len(block))))

        return pl.BlockSpec((1, *block), index)

    kernel = functools.partial(_scan_kernel, compute=compute, number=len(inputs))
    return _call(
        kernel, inputs, output, store, (first, read, write, real.any(axis=1).astype(jnp.int32), fetched, flushed),
        grid=(store.shape[1 + axis] // block[axis], len(first)), slots=(slot(-2), slot(-1)),
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


def _scan_kernel(tile_first, read_slot, write_slot, live, _fetched, _flushed, *references, compute, number: int):
    inputs, (state_in, y, state_out, carry, *memory) = references[:number], references[number:]
    tile = pl.program_id(1)

    @pl.when(tile_first[tile] > 0)
    def _():
        # A select, not a product: the null slot may hold NaN.
        carry[...] = jnp.where(read_slot[tile] > 0, state_in[0].astype(F32), 0)

    @pl.when(live[tile] > 0)
    def _():
        compute(tile, inputs, y, carry, state_out.dtype, *memory)

    @pl.when(live[tile] == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

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

    kernel = functools.partial(_update_kernel, compute=compute, number=len(inputs), steps=steps)
    scalars = (
        places.read_slot.astype(jnp.int32),
        # One axis: in scalar memory, the last of two axes is padded to 128.
        places.write_slot.astype(jnp.int32).reshape(-1),
        real.astype(jnp.int32).reshape(-1),
    )
    return _call(
        kernel, inputs, output, store, scalars, grid=(store.shape[1] // heads, rows, steps),
        slots=(slot(lambda i, t, read, *_: read[i]), slot(lambda i, t, read, write, _: write[i * steps + t])),
        memory=[pltpu.VMEM(block if steps > 1 else (8, 128), F32)], cost=cost, interpret=interpret, name=name,
    )  # fmt: skip


def _update_kernel(read_slot, write_slot, real, *references, compute, number: int, steps: int):
    inputs, (state_in, y, state_out, carry) = references[:number], references[number:]
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


def _call(kernel, inputs, output, store, scalars, *, grid, slots, memory, vmem_bytes=None, cost, interpret, name):
    shape, y_blocks = output
    sequential: list[Any] = ["arbitrary"] * (len(grid) - 1)
    return pl.pallas_call(
        kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=grid,
            in_specs=[*(blocks for _, blocks in inputs), slots[0]],
            out_specs=[y_blocks, slots[1]],
            scratch_shapes=memory,
        ),
        out_shape=[shape, jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={len(scalars) + len(inputs): 1},
        # Blocks of a state access disjoint parts of every slot (the null slot included).
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *sequential), vmem_limit_bytes=vmem_bytes
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(*scalars, *(array for array, _ in inputs), store)
