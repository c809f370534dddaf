"""The state update as one Triton kernel: each program takes some channels of one head of one row through all steps.

The state comes from its slot into registers once and goes out after every step; the store is input and output in one
buffer. Accesses to slot 0 are masked: the kernel neither reads nor writes them.

Rows run side by side, which is why no row may write a slot that another row reads (`kernels_pallas.slots`).
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
    power_of_two_in,
    store_if,
    update_call,
)

F32 = jnp.float32


def unsupported(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Returns why this call cannot run, or None."""
    if 0 in (*x.shape, *b.shape):
        return "it is empty"
    if offsets_overflow(store):
        return "offsets into the store do not fit in 32 bits"
    if not is_power_of_two(b.shape[3]):
        return f"the state size is {b.shape[3]}, not a power of two"
    return None


def state_update(
    x, dt, a, b, c, d, store, *, read_slot, write_slot, interpret=False, channels=32, warps=4
):  # fmt: skip
    """See `api.state_update`. `channels` (at most, of a head) go into one program of `warps` warps."""
    rows, steps, heads, head_dim = x.shape
    block = power_of_two_in(head_dim, channels)
    inputs = (
        read_slot.astype(jnp.int32),
        write_slot.astype(jnp.int32),
        # Whether a step is real depends on all heads, but a program sees only one.
        (dt != 0).any(axis=2),
        x,
        dt.astype(F32),
        # Not in the kernel: XLA computes it together with dt, while -exp(A_log) alone would be a kernel of its own.
        dt.astype(F32) * a.astype(F32),
        b,
        c,
        d.astype(F32),
    )
    y, store = update_call(
        functools.partial(_kernel, steps=steps, block=block, repeats=heads // b.shape[2]),
        "state_update",
        (rows, heads, head_dim // block),
        inputs,
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        (store,),
        interpret=interpret,
        warps=warps,
    )
    return y, store


def _kernel(
    read_slot,
    write_slot,
    real,
    x,
    dt,
    log_decay,
    b,
    c,
    d,
    state_in,
    y,
    state_out,
    *,
    steps: int,
    block: int,
    repeats: int,
):
    row, head, part = (pl.program_id(axis) for axis in range(3))
    group = lax.div(head, repeats)
    size = state_in.shape[3]
    here = pl.ds(part * block, block)
    source = plt.load(read_slot.at[row])
    state = load_if(source > 0, state_in.at[source, head, here, :], block, size).astype(F32)
    skip = plt.load(d.at[head])
    for t in map(jnp.int32, range(steps)):  # the interpreter does not accept plain integers
        # Padding may hold NaN, and 0 * NaN is NaN: its values are masked.
        live = plt.load(real.at[row, t])
        values = load_if(live, x.at[row, t, head, here], block).astype(F32)
        bt, ct = (load_if(live, v.at[row, t, group, :], size).astype(F32) for v in (b, c))
        step = plt.load(dt.at[row, t, head])
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = (
            state * jnp.exp(plt.load(log_decay.at[row, t, head])) + (step * values)[:, None] * bt[None, :]
        ).astype(state_out.dtype)
        state = stored.astype(F32)
        out = jnp.sum(state * ct[None, :], axis=1) + skip * values
        plt.store(y.at[row, t, head, here], out.astype(y.dtype))
        target = plt.load(write_slot.at[row, t])
        store_if(target > 0, state_out.at[target, head, here, :], stored)
