"""The selective scan and its update as one TPU kernel: the state in VMEM from a row's first tile to its last.

The grid is that of `kernels_pallas.tpu_pipeline.scan`, with blocks of channels. A step of the update is a tile of one
token: a row's first step reads its slot, and each step has a slot to write.

A state has channels in lanes and its entries in sublanes, as the store does. A token's B and C are therefore columns.
Each is spread over the lanes of a register, once for all channels of a block. The tokens of a tile run one after the
other: each number of a state has a decay of its own, so that no product of matrices contains several tokens. The state
of a few registers of channels stays in registers from token to token.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import tpu_pipeline
from kernels_pallas.places import Tiles
from kernels_pallas.tpu_blocks import F32, LANES

BLOCK_BYTES = 8 << 20  # of inputs, outputs and states in VMEM; the columns of B and C come in addition
LONGEST = 128  # tokens of a grid step; longer tiles are divided. They take 2 MiB of columns for 16 entries
# Channels whose states are in registers at a time: with 16 entries, 8 of 64 registers, and as many for their rates.
TOGETHER = 512
UNROLLED = 8  # tokens in the body of a loop: the rows of a register, which the compiler can overlap


def unsupported(entry, store, places, *, a, d):
    return "the state size is 1" if entry.b.shape[2] == 1 else None


def selective_scan(entry, store, tiles, *, a, d, interpret=False):
    size = entry.x.shape[1]
    parts = size // math.gcd(size, LONGEST) if size > LONGEST else 1
    places = Tiles(_at(0, tiles.first, parts), _at(0, tiles.read_slot, parts), _at(parts - 1, tiles.write_slot, parts))
    return _scan(entry, a, d, store, places, length=size // parts, parts=parts, by_token=False, interpret=interpret)


def selective_update(entry, store, rows, *, a, d, interpret=False):
    count, steps = rows.write_slot.shape
    first, read_slot = _at(0, jnp.ones(count, bool), steps), _at(0, rows.read_slot, steps)
    places = Tiles(first, read_slot, rows.write_slot.reshape(-1))
    return _scan(entry, a, d, store, places, length=1, parts=1, by_token=True, interpret=interpret)


def _at(place, values, parts):
    """Returns the values [n] at this part of each of n wholes, and zeros at the others: [n * parts]."""
    return jnp.zeros((len(values), parts), values.dtype).at[:, place].set(values).reshape(-1)


def _scan(entry, a, d, store, places, *, length, parts, by_token, interpret):
    """Runs the kernel over `parts` of tiles, `length` tokens each. States are rounded after tiles, or `by_token`."""
    x, b, c, dt = (v.reshape(-1, length, v.shape[2]) for v in entry)
    (tiles, size, inner), state = x.shape, b.shape[2]
    block, together = _channels(inner, size, state, x.dtype)
    spread = LANES if together % LANES == 0 else together
    # Padding may hold NaN. A token is padding if dt is 0 in all channels, and no other has a 0.
    real = dt[:, :, 0] != 0
    b, c = (jnp.where(real[..., None], v, 0).astype(F32) for v in (b, c))

    def compute(place, inputs, y, carry, stored, rows, b_columns, c_columns):
        x, dt, a, b, c, d = inputs
        steps = dt[0]
        values = jnp.where(steps != 0, x[0].astype(F32), 0)
        # What each token feeds to its channels; replaced by what it reads from them.
        rows[...] = steps * values
        _spread(b, b_columns)
        _spread(c, c_columns)
        for start in range(0, carry.shape[1], together):
            lanes = slice(start, start + together)
            _scan_channels(dt, a, b_columns, c_columns, rows, carry, lanes, stored if by_token else F32)
        y[0] = (rows[...] + values * d[...]).astype(y.dtype)
        if stored != F32 and not by_token:

            @pl.when(lax.rem(place[1], parts) == parts - 1)
            def _():
                # Rounded to the store's dtype, so that dividing a row's tiles over several calls changes nothing.
                carry[...] = carry[...].astype(stored).astype(F32)

    channels = pl.BlockSpec((1, size, block), lambda h, i, *_: (i, 0, h))
    tokens = pl.BlockSpec((1, size, state), lambda h, i, *_: (i, 0, 0))
    y, store = tpu_pipeline.scan(
        compute,
        [
            (x, channels),
            (dt.astype(F32), channels),
            (a.astype(F32), pl.BlockSpec((state, block), lambda h, i, *_: (0, h))),
            (b, tokens),
            (c, tokens),
            (d.astype(F32)[None], pl.BlockSpec((1, block), lambda h, i, *_: (0, h))),
        ],
        (jax.ShapeDtypeStruct(x.shape, x.dtype), channels),
        store,
        places,
        real=real,
        block=(state, block),
        axis=1,
        memory=[pltpu.VMEM((size, block), F32), *[pltpu.VMEM((size, state, spread), F32)] * 2],
        cost=_cost(x, b, store, rows=tiles),
        interpret=interpret,
        name="selective_update" if by_token else "selective_scan",
    )
    return y.reshape(entry.x.shape), store


def _channels(inner, size, state, dtype) -> tuple[int, int]:
    """Returns the channels of a block, and how many of them are in registers together."""
    # Inputs and outputs are in VMEM twice, one being computed and one being moved.
    per_token = 4 * jnp.dtype(dtype).itemsize + 2 * 4 + 4
    most = BLOCK_BYTES // (size * per_token + 6 * 4 * state)
    fitting = [n for n in range(LANES, inner + 1, LANES) if inner % n == 0 and n <= max(most, LANES)]
    block = fitting[-1] if fitting else inner
    return block, math.gcd(block, TOGETHER) if fitting else block


def _scan_channels(dt, a, b_columns, c_columns, rows, carry, lanes, rounded):
    """Runs some channels of a tile. The state is rounded to the dtype `rounded` after each token."""
    rates = a[:, lanes]
    repeats = rates.shape[1] // b_columns.shape[2]

    def some(tokens, state):
        # Whole registers: a row of one is neither loaded nor stored on its own.
        here = pl.ds(tokens[0], len(tokens))
        steps, fed = dt[0, here, lanes], rows[here, lanes]
        place, out = lax.broadcasted_iota(jnp.int32, fed.shape, 0), jnp.zeros(fed.shape, F32)
        for i, t in enumerate(tokens):
            bt, ct = (jnp.concatenate([columns[t]] * repeats, axis=1) for columns in (b_columns, c_columns))
            state = jnp.exp(steps[i : i + 1] * rates) * state + fed[i : i + 1] * bt
            state = state.astype(rounded).astype(F32)
            out = jnp.where(place == i, jnp.sum(state * ct, axis=0, keepdims=True), out)
        rows[here, lanes] = out
        return state

    carry[:, lanes] = _tokens_together(rows.shape[0], some, carry[:, lanes])


def _spread(v, columns):
    """Writes each token's row of v [1, size, state] as a column, repeated in the lanes of columns [size, state, n]."""
    state = v.shape[2]
    row, column = (lax.broadcasted_iota(jnp.int32, (state, state), axis) for axis in (0, 1))

    def some(tokens, carry):
        for t in tokens:
            one = jnp.broadcast_to(v[0, pl.ds(t, 1), :], (state, state))
            turned = jnp.sum(jnp.where(row == column, one, 0), axis=1, keepdims=True)
            columns[t] = jnp.broadcast_to(turned, columns.shape[1:])
        return carry

    _tokens_together(v.shape[1], some, 0)


def _tokens_together(size: int, some, carry):
    """Returns the carry after `some(tokens, carry)` for a few consecutive tokens at a time."""
    few = math.gcd(size, UNROLLED)

    def body(i, carry):
        start = pl.multiple_of(i * few, few)
        return some([start + j for j in range(few)], carry)

    return lax.fori_loop(0, size // few, body, carry)


def _cost(x, b, store, *, rows: int) -> pl.CostEstimate:
    tokens, inner, state = x.shape[0] * x.shape[1], x.shape[2], b.shape[2]
    return pl.CostEstimate(
        flops=7 * tokens * inner * state,
        transcendentals=tokens * inner * state,
        # Assumes that every tile reads and writes a state; of a prompt's most do not.
        bytes_accessed=tokens * (inner * (2 * x.dtype.itemsize + 4) + 8 * state)
        + 2 * rows * inner * state * store.dtype.itemsize,
    )
