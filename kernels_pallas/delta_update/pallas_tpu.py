"""The delta update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

Grid, slots and padding are those of `kernels_pallas.state_update.pallas_tpu`: blocks of heads, rows and steps
(innermost); blocks of states named by prefetched slot numbers; the store is input and output in one buffer.
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
BLOCK_BYTES = 1 << 20  # bytes of state moved at a time: large enough to hide a grid step's fixed cost


def unsupported(q, k, v, log_decay, beta, store, *, read_slot, write_slot):
    """Returns why this call cannot run, or None."""
    return "it is empty" if 0 in (*v.shape, *k.shape) else None


def delta_update(q, k, v, log_decay, beta, store, *, read_slot, write_slot, interpret=False):
    """See `api.delta_update`."""
    rows, steps, _, head_dim = v.shape
    groups, state = k.shape[2:]
    blocks = blocks_in_rows(v, k.shape[2], store, block_bytes=BLOCK_BYTES)
    # A step is real if any head has beta != 0. The kernel never uses values of padding.
    real = (beta != 0).any(axis=2).astype(jnp.int32)

    def token(*last):
        return pl.BlockSpec((1, 1, *last), lambda h, i, t, *_: (i, t, 0, 0))

    per_head = pl.BlockSpec((1, 1, blocks.heads, head_dim), lambda h, i, t, *_: (i, t, h, 0))
    row_of_heads = pl.BlockSpec((1, 1, 1, 1, blocks.heads), lambda h, i, t, *_: (i, t, h, 0, 0))
    by_channel = log_decay.ndim == 4
    rows_of_keys = pl.BlockSpec((1, 1, blocks.heads, state), lambda h, i, t, *_: (i, t, h, 0))
    slot = (1, blocks.heads, head_dim, state)

    def by_heads(one):
        return one.astype(F32).reshape(rows, steps, blocks.count, 1, blocks.heads)

    y, store = pl.pallas_call(
        functools.partial(_kernel, blocks=blocks, steps=steps, by_channel=by_channel),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(blocks.count, rows, steps),
            in_specs=[
                token(groups, state),
                token(groups, state),
                per_head,
                rows_of_keys if by_channel else row_of_heads,
                row_of_heads,
                pl.BlockSpec(slot, lambda h, i, t, read, write, real: (read[i], h, 0, 0)),
            ],
            out_specs=[
                per_head,
                pl.BlockSpec(slot, lambda h, i, t, read, write, real: (write[i * steps + t], h, 0, 0)),
            ],
            scratch_shapes=[pltpu.VMEM(slot[1:] if steps > 1 else (8, 128), F32)],
        ),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={8: 1},
        # Blocks of heads access disjoint parts of every slot (the null slot included).
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary")),
        cost_estimate=_cost(v, k, log_decay, store),
        interpret=interpret,
        name="delta_update",
    )(
        read_slot.astype(jnp.int32),
        # One axis: in scalar memory, the last of two axes is padded to 128.
        write_slot.astype(jnp.int32).reshape(-1),
        real.reshape(-1),
        q.astype(F32),
        k.astype(F32),
        v,
        log_decay.astype(F32) if by_channel else by_heads(log_decay),
        by_heads(beta),
        store,
    )
    return y, store


def _kernel(
    read_slot, write_slot, real, q, k, v, log_decay, beta, state_in, y, state_out, carry, *,
    blocks: HeadBlocks, steps: int, by_channel: bool,
):  # fmt: skip
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
        values, share = v[0, 0].astype(F32).T, beta[0, 0, 0]
        decay = jnp.exp(log_decay[0, 0] if by_channel else log_decay[0, 0, 0])
        lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        out = jnp.zeros(values.shape, F32)
        first = blocks.first_group(block)
        for group in range(blocks.groups):
            qt, kt = (one[0, 0, pl.ds(first + group, 1), :] for one in (q, k))
            for head in range(blocks.heads)[blocks.heads_of(group)]:
                here = slice(head, head + 1)
                old = before(head) * (decay[here] if by_channel else decay[:, here])
                error = values[:, here] - jnp.sum(old * kt, axis=1, keepdims=True)
                # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
                stored = (old + error * share[:, here] * kt).astype(state_out.dtype)
                state_out[0, head] = stored
                state = stored.astype(F32)
                if steps > 1:
                    carry[head] = state
                out = jnp.where(lane == head, jnp.sum(state * qt, axis=1, keepdims=True), out)
        y[0, 0] = out.T.astype(y.dtype)

    @pl.when(real[index] == 0)
    def _():
        y[...] = jnp.zeros(y.shape, y.dtype)

    @pl.when((real[index] == 0) & (write_slot[index] > 0))
    def _():
        state_out[0] = before(slice(None)).astype(state_out.dtype)


def _cost(v, k, log_decay, store) -> pl.CostEstimate:
    rows, steps, heads, head_dim = v.shape
    tokens, state, decays = rows * steps, heads * head_dim * k.shape[3], log_decay.size
    small = tokens * (2 * heads * head_dim * v.dtype.itemsize + 4 * heads + 8 * k.shape[2] * k.shape[3]) + 4 * decays
    return pl.CostEstimate(
        flops=7 * tokens * state,
        transcendentals=decays,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )
