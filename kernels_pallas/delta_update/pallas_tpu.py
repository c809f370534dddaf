"""The delta update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

The grid is that of `kernels_pallas.tpu_pipeline.update`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_pipeline
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
    by_channel = log_decay.ndim == 4

    def token(*last):
        return pl.BlockSpec((1, 1, *last), lambda h, i, t, *_: (i, t, 0, 0))

    def per_head(width):
        return pl.BlockSpec((1, 1, blocks.heads, width), lambda h, i, t, *_: (i, t, h, 0))

    def by_heads(one):
        row_of_heads = pl.BlockSpec((1, 1, 1, 1, blocks.heads), lambda h, i, t, *_: (i, t, h, 0, 0))
        return one.astype(F32).reshape(rows, steps, blocks.count, 1, blocks.heads), row_of_heads

    def compute(block, inputs, y, before, keep):
        q, k, v, log_decay, beta = inputs
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
                new = keep(head, old + error * share[:, here] * kt)
                out = jnp.where(lane == head, jnp.sum(new * qt, axis=1, keepdims=True), out)
        y[0, 0] = out.T.astype(y.dtype)

    return tpu_pipeline.update(
        compute,
        [
            (q.astype(F32), token(groups, state)),
            (k.astype(F32), token(groups, state)),
            (v, per_head(head_dim)),
            (log_decay.astype(F32), per_head(state)) if by_channel else by_heads(log_decay),
            by_heads(beta),
        ],
        (jax.ShapeDtypeStruct(v.shape, v.dtype), per_head(head_dim)),
        store,
        read_slot=read_slot,
        write_slot=write_slot,
        # A step is real if any head has beta != 0. The kernel never uses values of padding.
        real=(beta != 0).any(axis=2),
        heads=blocks.heads,
        cost=_cost(v, k, log_decay, store),
        interpret=interpret,
        name="delta_update",
    )


def _cost(v, k, log_decay, store) -> pl.CostEstimate:
    rows, steps, heads, head_dim = v.shape
    tokens, state, decays = rows * steps, heads * head_dim * k.shape[3], log_decay.size
    small = tokens * (2 * heads * head_dim * v.dtype.itemsize + 4 * heads + 8 * k.shape[2] * k.shape[3]) + 4 * decays
    return pl.CostEstimate(
        flops=7 * tokens * state,
        transcendentals=decays,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )
