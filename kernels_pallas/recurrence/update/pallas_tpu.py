"""The update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

The grid is that of `kernels_pallas.tpu_pipeline.update`. The vector units compute a step of the delta rule, which needs
the old state's product with the key first. Without erasing, products on the matrix unit are faster (`tpu_products`).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_pipeline
from kernels_pallas.recurrence.update import tpu_products
from kernels_pallas.tpu_blocks import blocks_in_rows

F32 = jnp.float32
BLOCK_BYTES = 1 << 20  # bytes of state moved at a time: large enough to hide a grid step's fixed cost


def unsupported(entry, store, rows, *, erase, skip):
    if entry.by_channel and skip is not None:
        return "channels decay on their own, and there is a direct path"
    return None


def update(entry, store, rows, *, erase, skip, interpret=False):
    if not erase and not entry.by_channel:
        blocks, compute, inputs, output = tpu_products.kernel(entry, store, skip, block_bytes=BLOCK_BYTES)
    else:
        blocks, compute, inputs, output = _kernel(entry, store, erase)
    # The kernel never uses values of padding.
    y, store = tpu_pipeline.update(
        compute, inputs, output, store, rows, real=entry.real, heads=blocks.heads,
        cost=_cost(entry, store, erase), interpret=interpret, name="recurrence_update",
    )  # fmt: skip
    return y.reshape(entry.value.shape), store


def _kernel(entry, store, erase):
    """Returns the blocks, the function of a grid step, the inputs and the output."""
    query, key, value, log_decay, strength = entry
    (rows, steps, _, head_dim), (groups, state), by_channel = value.shape, key.shape[2:], entry.by_channel
    blocks = blocks_in_rows(value, groups, store, block_bytes=BLOCK_BYTES)

    def token(*last):
        return pl.BlockSpec((1, 1, *last), lambda h, i, t, *_: (i, t, 0, 0))

    def per_head(width):
        return pl.BlockSpec((1, 1, blocks.heads, width), lambda h, i, t, *_: (i, t, h, 0))

    def by_heads(v):
        row_of_heads = pl.BlockSpec((1, 1, 1, 1, blocks.heads), lambda h, i, t, *_: (i, t, h, 0, 0))
        return v.astype(F32).reshape(rows, steps, blocks.count, 1, blocks.heads), row_of_heads

    def compute(block, inputs, y, before, keep):
        query, key, value, log_decay, strength = inputs
        # Heads in lanes: what is fed to a head is then a column, which the state's rows take as it is.
        values, strengths = value[0, 0].astype(F32).T, strength[0, 0, 0]
        decay = jnp.exp(log_decay[0, 0] if by_channel else log_decay[0, 0, 0])
        lane = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        out = jnp.zeros(values.shape, F32)
        first = blocks.first_group(block)
        for group in range(blocks.groups):
            qt, kt = (v[0, 0, pl.ds(first + group, 1), :] for v in (query, key))
            for head in range(blocks.heads)[blocks.heads_of(group)]:
                here = slice(head, head + 1)
                old = before(head) * (decay[here] if by_channel else decay[:, here])
                error = values[:, here] - jnp.sum(old * kt, axis=1, keepdims=True) if erase else values[:, here]
                new = keep(head, old + error * strengths[:, here] * kt)
                out = jnp.where(lane == head, jnp.sum(new * qt, axis=1, keepdims=True), out)
        y[0, 0] = out.T.astype(y.dtype)

    inputs = [
        (query.astype(F32), token(groups, state)),
        (key.astype(F32), token(groups, state)),
        (value, per_head(head_dim)),
        (log_decay.astype(F32), per_head(state)) if by_channel else by_heads(log_decay),
        by_heads(strength),
    ]
    return blocks, compute, inputs, (jax.ShapeDtypeStruct(value.shape, value.dtype), per_head(head_dim))


def _cost(entry, store, erase) -> pl.CostEstimate:
    (rows, steps, heads, head_dim), (groups, size) = entry.value.shape, entry.key.shape[2:]
    tokens, state, decays = rows * steps, heads * head_dim * size, entry.log_decay.size
    small = tokens * (2 * heads * head_dim * entry.value.dtype.itemsize + 4 * heads + 8 * groups * size) + 4 * decays
    return pl.CostEstimate(
        flops=(7 if erase else 5) * tokens * state,
        transcendentals=decays,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )
