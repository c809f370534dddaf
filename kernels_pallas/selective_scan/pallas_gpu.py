"""The selective scan and its update as Triton kernels. A program has the states of some channels in registers.

The update is one kernel: a program takes its channels of one row through all steps. The scan is three kernels, so that
the tiles of a single prompt can fill a GPU, as in `kernels_pallas.recurrence.scan.gpu_tiles`: what each tile adds to a
state of zeros, for all tiles in parallel; the states passed on from tile to tile; the outputs of all tiles, each from
the state before it. The first and the last run the recurrence token by token, as each number of a state has a decay of
its own. Between them are only the states before tiles, never those of tokens.

Accesses to slot 0 are masked: the kernels neither read nor write it. Rows run side by side, which is why no row may
write a slot that another row reads (`kernels_pallas.slots`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.triton_blocks import (
    is_power_of_two,
    load_if,
    offsets_overflow,
    pass_states_on,
    power_of_two_in,
    store_if,
)

F32 = jnp.float32
UNROLLED = 8  # tokens in the body of a loop, so that the loads of one do not wait for the computation of another


def unsupported(x, dt, a, b, c, d, store, places):
    """Returns why this call cannot run, or None."""
    if any(map(offsets_overflow, (store, x, dt))):
        return "offsets into the store or the tokens do not fit in 32 bits"
    if not is_power_of_two(b.shape[2]) or b.shape[2] == 1:
        return f"the state size is {b.shape[2]}, not a power of two above 1"
    return None


def selective_update(
    x, dt, a, b, c, d, store, places, *, interpret=False, channels=128, warps=4
):  # fmt: skip
    """See `api.selective_update`. `channels` (at most) go into one program of `warps` warps."""
    rows, steps, inner = x.shape
    block = power_of_two_in(inner, channels)
    return pl.pallas_call(
        functools.partial(_update, steps=steps, block=block),
        grid=(rows, inner // block),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={9: 1},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="selective_update",
    )(
        places.read_slot.astype(jnp.int32),
        places.write_slot.astype(jnp.int32),
        _real(dt),
        x,
        dt.astype(F32),
        a.astype(F32),
        b,
        c,
        d.astype(F32),
        store,
    )


def _real(dt):
    """Returns which tokens are no padding. Padding may hold NaN, and 0 * NaN is NaN: its values are masked."""
    return dt[:, :, 0] != 0


def _update(read_slot, write_slot, real, x, dt, a, b, c, d, state_in, y, state_out, *, steps: int, block: int):
    row, here = pl.program_id(0), pl.ds(pl.program_id(1) * block, block)
    source = plt.load(read_slot.at[row])
    state = load_if(source > 0, state_in.at[source, :, here], state_in.shape[1], block).astype(F32)
    rates, skip = plt.load(a.at[:, here]), plt.load(d.at[here])
    for t in map(jnp.int32, range(steps)):  # the interpreter does not accept plain integers
        state, values = _token(state, (row, t), here, real, x, dt, rates, b, block)
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = state.astype(state_out.dtype)
        state = stored.astype(F32)
        plt.store(y.at[row, t, here], (_read(state, (row, t), real, c) + skip * values).astype(y.dtype))
        target = plt.load(write_slot.at[row, t])
        store_if(target > 0, state_out.at[target, :, here], stored)


def _token(state, at, here, real, x, dt, rates, b, block):
    """Returns the state [state, block] after the token at this place, and the token's x in float32."""
    live, steps = plt.load(real.at[at]), plt.load(dt.at[(*at, here)])
    values = load_if(live, x.at[(*at, here)], block).astype(F32)
    bt = load_if(live, b.at[(*at, slice(None))], b.shape[2]).astype(F32)
    return jnp.exp(steps[None, :] * rates) * state + (steps * values)[None, :] * bt[:, None], values


def _read(state, at, real, c):
    """Returns the token's C times the state: [block]."""
    ct = load_if(plt.load(real.at[at]), c.at[(*at, slice(None))], c.shape[2]).astype(F32)
    return jnp.sum(state * ct[:, None], axis=0)


def selective_scan(
    x, dt, a, b, c, d, store, tiles, *, interpret=False, channels=64, warps=2
):  # fmt: skip
    """See `api.selective_scan`. `channels` (at most) go into one program of `warps` warps."""
    count, _, inner = x.shape
    block = power_of_two_in(inner, channels)
    call = functools.partial(
        pl.pallas_call,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
    )
    real, dt, a = _real(dt), dt.astype(F32), a.astype(F32)
    states = jax.ShapeDtypeStruct((count, *store.shape[1:]), F32)
    by_tile = (inner // block, count)
    across = jax.ShapeDtypeStruct((count, inner), F32)
    added, across = call(
        functools.partial(_added, block=block), grid=by_tile, out_shape=[states, across], name="selective_scan_added"
    )(real, x, dt, a, b)  # fmt: skip

    # The first tile has no previous tile: unless it begins a row, it starts from zeros.
    first = tiles.first.at[0].set(True)
    begun, store = call(
        functools.partial(_passed_on, block=block),
        grid=(inner // block,),
        out_shape=[states, jax.ShapeDtypeStruct(store.shape, store.dtype)],
        input_output_aliases={5: 0, 6: 1},
        name="selective_scan_passed_on",
    )(
        first.astype(jnp.int32),
        jnp.where(tiles.first, tiles.read_slot, 0).astype(jnp.int32),
        tiles.write_slot.astype(jnp.int32),
        across,
        a,
        added,
        store,
    )
    y = call(
        functools.partial(_outputs, block=block),
        grid=by_tile,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        name="selective_scan_outputs",
    )(real, x, dt, a, b, c, d.astype(F32), begun)
    return y, store


def _added(real, x, dt, a, b, added, across, *, block: int):
    """Computes what a tile adds to the state before it, and the sum of its step sizes."""
    tile, here = pl.program_id(1), pl.ds(pl.program_id(0) * block, block)
    rates = plt.load(a.at[:, here])

    def token(t, carry):
        state, total = carry
        state, _ = _token(state, (tile, t), here, real, x, dt, rates, b, block)
        return state, total + plt.load(dt.at[tile, t, here])

    state, total = _each_token(x.shape[1], token, (jnp.zeros(rates.shape, F32), jnp.zeros(block, F32)))
    plt.store(added.at[tile, :, here], state)
    plt.store(across.at[tile, here], total)


def _passed_on(first, read_slot, write_slot, across, a, added, store_in, begun, store_out, *, block: int):
    """Returns the state before each tile, in place of the tile's contribution, and the states for slots."""
    here = pl.ds(pl.program_id(0) * block, block)
    rates = plt.load(a.at[:, here])

    def decay(tile):
        return jnp.exp(plt.load(across.at[tile, here])[None, :] * rates)

    slots = first, read_slot, write_slot
    pass_states_on(slots, decay, added, store_in, begun, store_out, (slice(None), here), rates.shape)


def _outputs(real, x, dt, a, b, c, d, begun, y, *, block: int):
    """Computes a tile's outputs from the state before the tile."""
    tile, here = pl.program_id(1), pl.ds(pl.program_id(0) * block, block)
    rates, skip = plt.load(a.at[:, here]), plt.load(d.at[here])

    def token(t, state):
        state, values = _token(state, (tile, t), here, real, x, dt, rates, b, block)
        plt.store(y.at[tile, t, here], (_read(state, (tile, t), real, c) + skip * values).astype(y.dtype))
        return state

    _each_token(x.shape[1], token, plt.load(begun.at[tile, :, here]))


def _each_token(size: int, token, carry):
    """Returns the carry after `token(t, carry)` for each token of a tile."""
    unrolled = power_of_two_in(size, UNROLLED)

    def some(i, carry):
        for j in range(unrolled):
            carry = token(i * unrolled + j, carry)
        return carry

    return lax.fori_loop(0, size // unrolled, some, carry)
