"""The selective scan and its update as Triton kernels. A program has the states of some channels in registers.

The update is one kernel: a program takes its channels of one row through all steps. The scan is three kernels, as in
`kernels_pallas.recurrence.scan.gpu_tiles`: what each tile adds to a state of zeros; the states passed on from tile to
tile; the outputs of all tiles, each from the state before it. The first and the last run the recurrence token by token,
as each number of a state has a decay of its own, for all tiles in parallel. Between them are only the states before
tiles, never those of tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import triton_blocks as triton

F32 = jnp.float32
UPDATE_CHANNELS, SCAN_CHANNELS = 128, 64  # at most, in one program
UNROLLED = 8  # tokens in the body of a loop, so that the loads of one do not wait for the computation of another


def unsupported(entry, store, places, *, a, d):
    if any(map(triton.offsets_overflow, (store, entry.x, entry.dt))):
        return "offsets into the store or the tokens do not fit in 32 bits"
    if not triton.is_power_of_two(store.shape[1]) or store.shape[1] == 1:
        return f"the state size is {store.shape[1]}, not a power of two above 1"
    return None


def selective_update(entry, store, rows, *, a, d, interpret=False):
    (x, b, c, dt), (count, steps, inner) = entry, entry.x.shape
    block = triton.power_of_two_in(inner, UPDATE_CHANNELS)
    slots = rows.read_slot.astype(jnp.int32), rows.write_slot.astype(jnp.int32)
    return triton.update_call(
        functools.partial(_update, steps=steps, block=block), "selective_update", (count, inner // block),
        (*slots, _real(dt), x, dt.astype(F32), a.astype(F32), b, c, d.astype(F32)),
        jax.ShapeDtypeStruct(x.shape, x.dtype), (store,), interpret=interpret,
    )  # fmt: skip


def _real(dt):
    """Returns which tokens are no padding. Padding may hold NaN, and 0 * NaN is NaN: its values are masked."""
    return dt[:, :, 0] != 0


def _update(read_slot, write_slot, real, x, dt, a, b, c, d, state_in, y, state_out, *, steps: int, block: int):
    row, here = pl.program_id(0), pl.ds(pl.program_id(1) * block, block)
    source = plt.load(read_slot.at[row])
    state = triton.load_if(source > 0, state_in.at[source, :, here], state_in.shape[1], block).astype(F32)
    rates, skip = plt.load(a.at[:, here]), plt.load(d.at[here])
    for t in map(jnp.int32, range(steps)):  # the interpreter does not accept plain integers
        state, values = _token(state, (row, t), here, real, x, dt, rates, b, block)
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = state.astype(state_out.dtype)
        state = stored.astype(F32)
        plt.store(y.at[row, t, here], (_read(state, (row, t), real, c) + skip * values).astype(y.dtype))
        target = plt.load(write_slot.at[row, t])
        triton.store_if(target > 0, state_out.at[target, :, here], stored)


def _token(state, at, here, real, x, dt, rates, b, block):
    """Returns the state [state, block] after the token at this place, and the token's x in float32."""
    live, steps = plt.load(real.at[at]), plt.load(dt.at[(*at, here)])
    values = triton.load_if(live, x.at[(*at, here)], block).astype(F32)
    bt = triton.load_if(live, b.at[(*at, slice(None))], b.shape[2]).astype(F32)
    return jnp.exp(steps[None, :] * rates) * state + (steps * values)[None, :] * bt[:, None], values


def _read(state, at, real, c):
    """Returns the token's C times the state: [block]."""
    ct = triton.load_if(plt.load(real.at[at]), c.at[(*at, slice(None))], c.shape[2]).astype(F32)
    return jnp.sum(state * ct[:, None], axis=0)


def selective_scan(entry, store, tiles, *, a, d, interpret=False):
    (x, b, c, dt), (count, _, inner) = entry, entry.x.shape
    block = triton.power_of_two_in(inner, SCAN_CHANNELS)
    call = functools.partial(
        pl.pallas_call, compiler_params=plt.CompilerParams(num_warps=2, num_stages=1), interpret=interpret
    )
    real, dt, a = _real(dt), dt.astype(F32), a.astype(F32)
    states = jax.ShapeDtypeStruct((count, *store.shape[1:]), F32)
    by_tile = (inner // block, count)
    across = jax.ShapeDtypeStruct((count, inner), F32)
    added, across = call(
        functools.partial(_added, block=block), grid=by_tile, out_shape=[states, across], name="selective_scan_added"
    )(real, x, dt, a, b)  # fmt: skip

    part, grid = functools.partial(_part, block=block), (inner // block,)
    begun, store = triton.pass_states_on(call, "selective_scan_passed_on", grid, part, tiles, (across, a), added, store)
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


def _part(across, a, *, block: int):
    """Some channels, for `pass_states_on`."""
    here = pl.ds(pl.program_id(0) * block, block)
    rates = plt.load(a.at[:, here])
    return (slice(None), here), rates.shape, lambda tile: jnp.exp(plt.load(across.at[tile, here])[None, :] * rates)


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
    unrolled = triton.power_of_two_in(size, UNROLLED)

    def some(i, carry):
        for j in range(unrolled):
            carry = token(i * unrolled + j, carry)
        return carry

    return lax.fori_loop(0, size // unrolled, some, carry)
