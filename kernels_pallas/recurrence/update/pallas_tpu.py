"""The update as one TPU kernel: each row's state goes from its slot through VMEM into the slots of its steps.

The grid is that of `kernels_pallas.tpu_pipeline.update`. The vector units compute a step of the delta rule, which needs
the old state's product with the key first. Without erasing, products on the matrix unit are faster (`_by_products`).
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


def unsupported(entry, store, rows, *, erase, skip):
    if entry.by_channel and skip is not None:
        return "channels decay on their own, and there is a direct path"
    return None


def update(entry, store, rows, *, erase, skip, interpret=False):
    if not erase and not entry.by_channel:
        blocks, compute, inputs, output = _by_products(entry, store, skip)
    else:
        blocks, compute, inputs, output = _by_vectors(entry, store, erase)
    # The kernel never uses values of padding.
    y, store = tpu_pipeline.update(
        compute, inputs, output, store, rows, real=entry.real, heads=blocks.heads,
        cost=_cost(entry, store, erase), interpret=interpret, name="recurrence_update",
    )  # fmt: skip
    return y.reshape(entry.value.shape), store


def _by_vectors(entry, store, erase):
    """Returns the blocks, the function of a grid step, the inputs and the output."""
    query, key, value, log_decay, strength = entry
    (rows, steps, _, head_dim), (groups, state), by_channel = value.shape, key.shape[2:], entry.by_channel
    blocks = blocks_in_rows(value, groups, store, block_bytes=BLOCK_BYTES)

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
        *_of_groups(query, key),
        (value, per_head(head_dim)),
        (log_decay.astype(F32), per_head(state)) if by_channel else by_heads(log_decay),
        by_heads(strength),
    ]
    return blocks, compute, inputs, (jax.ShapeDtypeStruct(value.shape, value.dtype), per_head(head_dim))


def _of_groups(*vectors):
    """Queries and keys with the blocks of a grid step, which has those of all groups."""
    return [(v.astype(F32), pl.BlockSpec((1, 1, *v.shape[2:]), lambda h, i, t, *_: (i, t, 0, 0))) for v in vectors]


def _cost(entry, store, erase) -> pl.CostEstimate:
    (rows, steps, heads, head_dim), (groups, size) = entry.value.shape, entry.key.shape[2:]
    tokens, state, decays = rows * steps, heads * head_dim * size, entry.log_decay.size
    small = tokens * (2 * heads * head_dim * entry.value.dtype.itemsize + 4 * heads + 8 * groups * size) + 4 * decays
    return pl.CostEstimate(
        flops=(7 if erase else 5) * tokens * state,
        transcendentals=decays,
        bytes_accessed=(rows + tokens) * state * store.dtype.itemsize + small,
    )


# The compiler keeps products in source order. Products are issued this many sets of heads ahead of their use, so that
# their results are ready in time.
AHEAD = 3


def _by_products(entry, store, skip):
    """The same for recurrences that do not erase and decay by heads.

    The update of a state (values with the key) and its output (the query with the state) are products, which the matrix
    unit sums in float32. Its operands have 8 bits of mantissa, so each number is passed as a sum of bfloat16 numbers
    (`kernels_pallas.tpu_blocks.bfloat16_parts`): exactly for updates, and with at least twice the output's digits for
    outputs. A token's output is computed from the decayed previous state plus the token's own contribution, so neither
    product waits for the other.
    """
    query, key, value, log_decay, strength = entry
    (rows, steps, heads, head_dim), groups = value.shape, key.shape[2]
    # Heads are grouped into sets whose channels fill the lanes of a register.
    together = heads_together(head_dim, heads // groups)
    width = together * head_dim
    blocks = blocks_in_rows(value, groups, store, together=together, block_bytes=BLOCK_BYTES)
    sets = blocks.heads // together

    def by_set(v):  # [..., heads] as [..., blocks, heads of a set, sets]
        v = v.astype(F32).reshape(*v.shape[:-1], blocks.count, sets, together).swapaxes(-1, -2)
        return v, pl.BlockSpec((1, 1, 1, together, sets), lambda h, i, t, *_: (i, t, h, 0, 0))

    dtype, digits = key.dtype, 2 if value.dtype.itemsize < 4 else 3

    def compute(block, inputs, y, before, keep):
        query, key, value, strength, log_decay, skip = inputs
        first = blocks.first_group(block)
        keys, queries = ([v[0, 0, pl.ds(first + i, 1), :] for i in range(blocks.groups)] for v in (key, query))
        y[0, 0] = _step(
            value[0, 0].astype(F32), strength[0, 0, 0], jnp.exp(log_decay[0, 0, 0]), keys, queries, skip[...], before,
            keep, held=store.dtype, dtype=dtype, digits=digits,
        ).astype(y.dtype)  # fmt: skip

    channels = pl.BlockSpec((1, 1, sets, width), lambda h, i, t, *_: (i, t, h, 0))
    weight = jnp.zeros(heads) if skip is None else skip
    weights = jnp.repeat(weight.astype(F32), head_dim).reshape(-1, width)
    value = value.reshape(rows, steps, -1, width)
    inputs = [
        *_of_groups(query, key),
        (value, channels),
        by_set(strength),
        by_set(log_decay),
        (weights, pl.BlockSpec((sets, width), lambda h, i, t, *_: (h, 0))),
    ]
    return blocks, compute, inputs, (jax.ShapeDtypeStruct(value.shape, value.dtype), channels)


def _step(value, strength, decay, key, query, skip, before, keep, *, held, dtype, digits: int):
    """Returns one token's outputs [sets, width], float32.

    Args:
        value, skip: [sets, width].
        strength, decay: [heads of a set, sets].
        key, query: an array [1, state] for each group, of values that fit in `dtype`.
        before: returns the state of some heads before the token; its values fit in `held`.
        keep: stores the state of a head after the token.
        digits: number of bfloat16 parts into which a state is split when it is read.
    """
    (together, sets), width, state = strength.shape, value.shape[1], key[0].shape[1]
    head_dim, of_group = width // together, sets // len(key)
    product = functools.partial(dot, dtype=BF16)
    place, lane = (lax.broadcasted_iota(jnp.int32, value.shape, axis) for axis in (0, 1))

    def of_channels(v):
        """Repeats values of heads, [together, sets], for each of their channels."""
        columns, spread = v.T, jnp.zeros(value.shape, F32)
        for i in range(together):
            spread = jnp.where(lax.div(lane, head_dim) == i, columns[:, i : i + 1], spread)
        return spread

    fed = value * of_channels(strength)
    # States have channels in rows, so inputs of a set must be a column. The matrix unit transposes them, too.
    rows, columns = (lax.broadcasted_iota(jnp.int32, (width, width), axis) for axis in (0, 1))
    parts = jnp.concatenate(bfloat16_parts(fed, F32))
    turned = product((rows == columns).astype(F32), parts, (1, 1)).astype(BF16)
    set_of = lax.rem(lax.broadcasted_iota(jnp.int32, turned.shape, 1), sets)

    def add(one):
        """Returns the inputs of a set's channels times the key. Parts are concatenated, and the product sums them."""
        alone = jnp.where(set_of == one, turned, 0)
        below = [
            jnp.broadcast_to(part, (alone.shape[1], state)) for part in bfloat16_parts(key[one // of_group], dtype)
        ]
        return functools.reduce(jnp.add, (product(alone, part, (1, 0)) for part in below)).reshape(-1, head_dim, state)

    several = math.gcd(of_group, 2)  # sets read at once, which fill the matrix unit of a v6e

    def read(one):
        """Returns the query times the states of several sets' channels, one row for each set."""
        states = before(slice(one * together, (one + several) * together)).reshape(several * width, state)
        parts = bfloat16_parts(states, held, digits)
        asked = jnp.concatenate(bfloat16_parts(query[one // of_group], dtype))
        operands = jnp.concatenate([asked] * len(parts), axis=1), jnp.concatenate(parts, axis=1)
        total = jnp.sum(product(*operands, (1, 1)), axis=0, keepdims=True)
        return [total[:, i * width : (i + 1) * width] for i in range(several)]

    decays = [jnp.broadcast_to(decay.T[:, i : i + 1], (sets, state)) for i in range(together)]
    both = [jnp.sum(kt * qt, axis=1, keepdims=True) for kt, qt in zip(key, query, strict=True)]
    added, got, own = [], jnp.zeros(value.shape, F32), jnp.zeros(value.shape, F32)
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
    return of_channels(decay) * got + fed * own + value * skip
