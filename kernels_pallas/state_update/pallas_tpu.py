"""The state update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

The grid is (blocks of heads, rows, steps), steps innermost. The blocks that the pipeline fetches and writes back are
named by prefetched slot numbers; the store is input and output in one buffer. Rows that follow each other on slot 0
(padding) name the same block, so nothing is fetched or written for them. A write to slot 0 is not skipped: the null
slot may hold anything.

A row's state is fetched once and written step by step. The next row's state is fetched while this one's is written,
which is why no row may write a slot that another row reads (`kernels_pallas.slots`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.heads import HeadBlocks
from kernels_pallas.tpu_blocks import blocks_in_rows

F32 = jnp.float32
BLOCK_BYTES = 1 << 20  # of the state that is moved at a time: large enough to hide a grid step's fixed cost


def unsupported(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Why this call cannot run, or None."""
    return "it is empty" if 0 in (*x.shape, *b.shape) else None


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot, interpret=False):
    """See `api.state_update`."""
    rows, steps, _, head_dim = x.shape
    groups, state = b.shape[2:]
    blocks = blocks_in_rows(x, b.shape[2], store, block_bytes=BLOCK_BYTES)
    # Which steps are real is decided over all heads. What padding holds is then never looked at.
    real = (dt != 0).any(axis=2).astype(jnp.int32)

    def token(*last):
        return pl.BlockSpec((1, 1, *last), lambda h, i, t, *_: (i, t, 0, 0))

    per_head = pl.BlockSpec((1, 1, blocks.heads, head_dim), lambda h, i, t, *_: (i, t, h, 0))
    row_of_heads = pl.BlockSpec((1, 1, 1, 1, blocks.heads), lambda h, i, t, *_: (i, t, h, 0, 0))
    weight = pl.BlockSpec((1, 1, blocks.heads), lambda h, i, t, *_: (h, 0, 0))
    slot = (1, blocks.heads, head_dim, state)
    y, store = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, steps=steps),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks.count, rows, steps),
            in_specs=[
                per_head,
                row_of_heads,
                weight,
                token(groups, state),
                token(groups, state),
                weight,
                pl.BlockSpec(slot, lambda h, i, t, read, write, real: (read[i], h, 0, 0)),
            ],
            out_specs=[
                per_head,
                pl.BlockSpec(slot, lambda h, i, t, read, write, real: (write[i * steps + t], h, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM(slot[1:] if steps > 1 else (8, 128), F32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={9: 1},
        # Blocks of heads touch different parts of every slot, the null slot's included.
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(x, b, store),
        interpret=interpret,
        name="state_update",
    )(
        read_slot.astype(jnp.int32),
        # One axis: in scalar memory the last one of two is padded to 128.
        write_slot.astype(jnp.int32).reshape(-1),
        real.reshape(-1),
        x,
        dt.astype(F32).reshape(rows, steps, blocks.count, 1, blocks.heads),
        a.astype(F32).reshape(blocks.count, 1, blocks.heads),
        b.astype(F32),
        c.astype(F32),
        d.astype(F32).reshape(blocks.count, 1, blocks.heads),
        store,
    )
    return y, store


def _kernel(
    read_slot, write_slot, real, x, dt, a, b, c, d, state_in, y, state_out, carry, *, blocks: HeadBlocks, steps: int
):
    block, row, step = (pl.program_id(axis) for axis in range(3))
    index = row * steps + step

    def start(heads):
        # A select, not a product: the null slot may hold NaN.
        return jnp.where(read_slot[row] > 0, state_in[0, heads].astype(F32), 0)

    if steps > 1:

        @pl.when(step == 0)
        def _():
            carry[...] = start(slice(None))

    def before(heads):
        return carry[heads] if steps > 1 else start(heads)

    @pl.when(real[index] > 0)
    def _():
        # Heads in lanes: what is fed to a head is then a column, which the state's rows take as it is.
        values, dt_row = x[0, 0].astype(F32).T, dt[0, 0, 0]
        decay, fed = jnp.exp(dt_row * a[0]), values * dt_row
        lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        out = values * d[0]
        first = blocks.first_group(block)
        for group in range(blocks.groups):
            bt, ct = (v[0, 0, pl.ds(first + group, 1), :] for v in (b, c))
            for head in range(blocks.heads)[blocks.heads_of(group)]:
                here = slice(head, head + 1)
                state = before(head) * decay[:, here] + fed[:, here] * bt
                # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
                stored = state.astype(state_out.dtype)
                state_out[0, head] = stored
                state = stored.astype(F32)
                if steps > 1:
                    carry[head] = state
                out = jnp.where(lane == head, out + jnp.sum(state * ct, axis=1, keepdims=True), out)
        y[0, 0] = out.T.astype(y.dtype)

    @pl.when(real[index] == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when((real[index] == 0) & (write_slot[index] > 0))
    def _():
        state_out[0] = before(slice(None)).astype(state_out.dtype)


def _cost(x, b, store) -> pl.CostEstimate:
    rows, steps, heads, head_dim = x.shape
    tokens, state = rows * steps, heads * head_dim * b.shape[3]
    small = tokens * (2 * heads * head_dim * x.dtype.itemsize + 4 * heads + 8 * b.shape[2] * b.shape[3])
    return pl.CostEstimate(
        flops=5 * tokens * state,
        transcendentals=tokens * heads,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )
