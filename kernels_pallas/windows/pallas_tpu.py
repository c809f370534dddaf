"""Windows on TPU: the store stays in the large memory, and each row's window is a copy of its own, many at once.

The store must lie there slot by slot (`mamba_jax.store_layout` sees to that): it would be copied otherwise.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.tpu_blocks import LANES, in_large_memory

BLOCK_BYTES = 2 << 20  # of the windows in the fast memory at a time; there are two such blocks


def unsupported(store, *rest, share=None):
    if store.shape[2] % LANES:
        return f"{store.shape[2]} channels, not a multiple of {LANES}"
    return None


def read_windows(store, index, *, interpret=False):
    return _call(_read, store, index, (), interpret=interpret, name="read_windows")


def write_windows(store, values, index, *, share, interpret=False):
    values = (values.astype(store.dtype),)
    return _call(_write, store, index, values, share=share, interpret=interpret, name="write_windows")


def _call(kernel, store, index, values, *, share=1.0, interpret, name):
    """Runs a kernel over blocks of rows, which are its output or, for `write_windows`, `values`; else the store is."""
    block = _rows_at_once(store, index)
    of_rows = pl.BlockSpec((block, *store.shape[1:]), lambda i, _: (i, 0, 0))
    there = pl.BlockSpec(memory_space=pltpu.HBM)
    return pl.pallas_call(
        functools.partial(kernel, block=block),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(len(index) // block,),
            in_specs=[of_rows, there] if values else [there],
            out_specs=there if values else of_rows,
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(store.shape if values else (len(index), *store.shape[1:]), store.dtype),
        input_output_aliases={2: 0} if values else {},
        cost_estimate=_cost(store, index, share),
        interpret=interpret,
        name=name,
    )(index.astype(jnp.int32), *values, store if interpret else in_large_memory(store))


def _read(index, store, found, done, *, block):
    def copy(row, slot):
        return pltpu.make_async_copy(store.at[slot], found.at[row], done)

    def nothing(row):
        found[row] = jnp.zeros(found.shape[1:], found.dtype)

    _copy_all(copy, index, block, nothing)


def _write(index, values, _, store, done, *, block):
    def copy(row, slot):
        return pltpu.make_async_copy(values.at[row], store.at[slot], done)

    _copy_all(copy, index, block)


def _copy_all(copy, index, block, otherwise=lambda row: None):
    """Runs the copies of a block's rows side by side, and for rows without a slot something else."""
    first = pl.program_id(0) * block

    def each(act, otherwise):
        def of_row(row, carry):
            slot = index[first + row]
            pl.when(slot > 0)(lambda: act(copy(row, slot)))
            pl.when(slot == 0)(lambda: otherwise(row))
            return carry

        lax.fori_loop(0, block, of_row, 0)

    each(lambda one: one.start(), otherwise)
    each(lambda one: one.wait(), lambda row: None)


def _rows_at_once(store, index):
    most = max(1, BLOCK_BYTES // _window_bytes(store))
    return max(n for n in range(1, min(most, len(index)) + 1) if len(index) % n == 0)


def _window_bytes(store):
    """Bytes of one slot in memory: small numbers of rows are padded to 2, 4 or 8."""
    rows = store.shape[1]
    padded = 1 << (rows - 1).bit_length() if rows < 8 else -(-rows // 8) * 8
    return padded * math.prod(store.shape[2:]) * store.dtype.itemsize


def _cost(store, index, share):
    """Windows as they lie in the store, of a share of the rows, and all rows' as an array of its own."""
    there, here = _window_bytes(store), math.prod(store.shape[1:]) * store.dtype.itemsize
    moved = int(len(index) * (share * there + here))
    return pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=moved)
