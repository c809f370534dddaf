"""The state update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

The grid is that of `kernels_pallas.tpu_pipeline.update`.

The update of a state (x and dt with B) and its output (C with the state) are products, which the matrix unit sums in
float32. Its operands have 8 bits of mantissa, so each number is passed as a sum of bfloat16 numbers
(`kernels_pallas.tpu_blocks.bfloat16_parts`): exactly for updates, and with at least twice the output's digits for
outputs. A token's output is computed from the decayed previous state plus the token's own contribution, so neither
product waits for the other.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas import tpu_pipeline
from kernels_pallas.tpu_blocks import bfloat16_parts, blocks_in_rows, dot, heads_together

BF16, F32 = jnp.bfloat16, jnp.float32
BLOCK_BYTES = 1 << 20  # bytes of state moved at a time: large enough to hide a grid step's fixed cost
# The compiler keeps products in source order. Products are issued this many sets of heads ahead of their use, so that
# their results are ready in time.
AHEAD = 3


def unsupported(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Returns why this call cannot run, or None."""
    return "it is empty" if 0 in (*x.shape, *b.shape) else None


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot, interpret=False):
    """See `api.state_update`."""
    rows, steps, heads, head_dim = x.shape
    groups, state = b.shape[2:]
    # Heads are grouped into sets whose channels fill the lanes of a register.
    together = heads_together(head_dim, heads // groups)
    width = together * head_dim
    blocks = blocks_in_rows(x, groups, store, together=together, block_bytes=BLOCK_BYTES)
    sets = blocks.heads // together

    def token(*last):
        return pl.BlockSpec((1, 1, *last), lambda h, i, t, *_: (i, t, 0, 0))

    def by_set(v):  # [..., heads] as [..., blocks, heads of a set, sets]
        return v.astype(F32).reshape(*v.shape[:-1], blocks.count, sets, together).swapaxes(-1, -2)

    def compute(block, inputs, y, before, keep):
        x, dt, a, b, c, d = inputs
        first = blocks.first_group(block)
        keys, queries = ([v[0, 0, pl.ds(first + i, 1), :] for i in range(blocks.groups)] for v in (b, c))
        y[0, 0] = _step(
            x[0, 0].astype(F32), dt[0, 0, 0], a[0], keys, queries, d[...], before, keep,
            held=store.dtype, dtype=dtype, digits=digits,
        ).astype(y.dtype)  # fmt: skip

    dtype, digits = b.dtype, 2 if x.dtype.itemsize < 4 else 3
    channels = pl.BlockSpec((1, 1, sets, width), lambda h, i, t, *_: (i, t, h, 0))
    y, store = tpu_pipeline.update(
        compute,
        [
            (x.reshape(rows, steps, -1, width), channels),
            (by_set(dt), pl.BlockSpec((1, 1, 1, together, sets), lambda h, i, t, *_: (i, t, h, 0, 0))),
            (by_set(a), pl.BlockSpec((1, together, sets), lambda h, i, t, *_: (h, 0, 0))),
            (b.astype(F32), token(groups, state)),
            (c.astype(F32), token(groups, state)),
            (
                jnp.repeat(d.astype(F32), head_dim).reshape(-1, width),
                pl.BlockSpec((sets, width), lambda h, i, t, *_: (h, 0)),
            ),
        ],
        (jax.ShapeDtypeStruct((rows, steps, heads // together, width), x.dtype), channels),
        store,
        read_slot=read_slot,
        write_slot=write_slot,
        # A step is real if any head has dt != 0. The kernel never uses values of padding.
        real=(dt != 0).any(axis=2),
        heads=blocks.heads,
        cost=_cost(x, b, store),
        interpret=interpret,
        name="state_update",
    )
    return y.reshape(x.shape), store


def _step(x, dt, a, b, c, d, before, keep, *, held, dtype, digits: int):
    """Returns one token's outputs [sets, width], float32.

    Args:
        x, d: [sets, width].
        dt, a: [heads of a set, sets].
        b, c: an array [1, state] for each group, of values that fit in `dtype`.
        before: returns the state of some heads before the token; its values fit in `held`.
        keep: stores the state of a head after the token.
        digits: number of bfloat16 parts into which a state is split when it is read.
    """
    (together, sets), width, state = dt.shape, x.shape[1], b[0].shape[1]
    head_dim, of_group = width // together, sets // len(b)
    product = functools.partial(dot, dtype=BF16)
    place, lane = (lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))

    def of_channels(v):
        """Repeats values of heads, [together, sets], for each of their channels."""
        columns, spread = v.T, jnp.zeros(x.shape, F32)
        for i in range(together):
            spread = jnp.where(lax.div(lane, head_dim) == i, columns[:, i : i + 1], spread)
        return spread

    decay, fed = jnp.exp(dt * a), x * of_channels(dt)
    # States have channels in rows, so inputs of a set must be a column. The matrix unit transposes them, too.
    rows, columns = (lax.broadcasted_iota(jnp.int32, (width, width), axis) for axis in (0, 1))
    parts = jnp.concatenate(bfloat16_parts(fed, F32))
    turned = product((rows == columns).astype(F32), parts, (1, 1)).astype(BF16)
    set_of = lax.rem(lax.broadcasted_iota(jnp.int32, turned.shape, 1), sets)

    def add(one):
        """Returns the inputs of a set's channels times B. Parts are concatenated, and the product sums them."""
        alone = jnp.where(set_of == one, turned, 0)
        below = [jnp.broadcast_to(part, (alone.shape[1], state)) for part in bfloat16_parts(b[one // of_group], dtype)]
        return functools.reduce(jnp.add, (product(alone, part, (1, 0)) for part in below)).reshape(-1, head_dim, state)

    several = math.gcd(of_group, 2)  # sets read at once, which fill the matrix unit of a v6e

    def read(one):
        """Returns C times the states of several sets' channels, one row for each set."""
        states = before(slice(one * together, (one + several) * together)).reshape(several * width, state)
        parts = bfloat16_parts(states, held, digits)
        asked = jnp.concatenate(bfloat16_parts(c[one // of_group], dtype))
        operands = jnp.concatenate([asked] * len(parts), axis=1), jnp.concatenate(parts, axis=1)
        total = jnp.sum(product(*operands, (1, 1)), axis=0, keepdims=True)
        return [total[:, i * width : (i + 1) * width] for i in range(several)]

    decays = [jnp.broadcast_to(decay.T[:, i : i + 1], (sets, state)) for i in range(together)]
    both = [jnp.sum(bt * ct, axis=1, keepdims=True) for bt, ct in zip(b, c, strict=True)]
    added, got, own = [], jnp.zeros(x.shape, F32), jnp.zeros(x.shape, F32)
    for one in range(-AHEAD, sets):
        if one + AHEAD < sets:
            added.append(add(one + AHEAD))
        if one < 0:
            continue
        if one % several == 0:
            # Runs before `keep`, which may overwrite the state that it reads.
            for i, total in enumerate(read(one)):
                got = jnp.where(place == one + i, total, got)
        own = jnp.where(place == one, both[one // of_group], own)
        for i in range(together):
            head = one * together + i
            keep(head, before(head) * decays[i][one : one + 1] + added[one][i])
    return of_channels(decay) * got + fed * own + x * d


def _cost(x, b, store) -> pl.CostEstimate:
    rows, steps, heads, head_dim = x.shape
    tokens, state = rows * steps, heads * head_dim * b.shape[3]
    small = tokens * (2 * heads * head_dim * x.dtype.itemsize + 4 * heads + 8 * b.shape[2] * b.shape[3])
    return pl.CostEstimate(
        flops=5 * tokens * state,
        transcendentals=tokens * heads,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )
