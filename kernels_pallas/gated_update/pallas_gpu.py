"""A Mamba2 layer's decode between its projections, as two Triton kernels.

1. Each program takes some channels of one head of one row: convolves them, and B and C of the head's group, and runs
   the state update. It writes states, windows of x, and y. B and C are convolved once for each program, which costs
   little: their taps and windows are a tenth of a program's states.
2. Each program takes one group of one row: gates y, normalises it, and writes the windows of B and C, which all
   programs of the first kernel read.

Both read one array with all of the projections' outputs: XLA writes it as one kernel, or not at all where the merged
product already has it. Ownership of slots is that of `kernels_pallas.state_update.pallas_gpu`: the stores are inputs
and outputs in one buffer, a program reads its channels before it writes them, and accesses to slot 0 are masked.
"""

import functools
import math

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
from kernels_pallas.triton_decode import NUMBERS, Channels, gate, indices

F32 = jnp.float32


def unsupported(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, windows, windows_bc, **options
):  # fmt: skip
    """Returns why this call cannot run, or None."""
    if 0 in (*zx.shape, *bc.shape, *windows.shape):
        return "it is empty"
    if any(offsets_overflow(array) for array in (store, windows, windows_bc)):
        return "offsets into a store do not fit in 32 bits"
    if not is_power_of_two(bc.shape[4]):
        return f"the state size is {bc.shape[4]}, not a power of two"
    return None


def gated_update(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, windows, windows_bc, *,
    valid, read_slot, write_slot, dt_limit, eps, norm_before_gate, interpret=False,
):  # fmt: skip
    """See `api.gated_update`."""
    rows, steps, _, inner = zx.shape
    groups, size, dtype = bc.shape[3], bc.shape[4], zx.dtype
    heads, head_dim = store.shape[1:3]
    block = power_of_two_in(head_dim, max(NUMBERS // size, 1))
    # In float32 for dt. The kernels round what zx and bc have rounded.
    projected = jnp.concatenate([v.reshape(rows, steps, -1).astype(F32) for v in (zx, bc, dt)], axis=2)
    slots = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32)
    y, store, windows = update_call(
        functools.partial(_update, inner=inner, groups=groups, size=size, block=block, dt_limit=dt_limit),
        "gated_update",
        (rows, heads, head_dim // block),
        (*slots, valid, projected, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, windows_bc),
        jax.ShapeDtypeStruct((rows, steps, inner), dtype),
        (store, windows),
        interpret=interpret,
    )
    out, windows_bc = gate(
        *slots, valid, projected, y, norm, windows_bc,
        groups=groups, norms=1, eps=eps, norm_before_gate=norm_before_gate, interpret=interpret,
    )  # fmt: skip
    return out, store, windows, windows_bc


def _update(
    read_slot, write_slot, valid, projected, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, windows_bc,
    states_in, windows_in, y, states, windows, *, inner, groups, size, block, dt_limit,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    steps, (_, heads, head_dim, _), dtype = write_slot.shape[1], states.shape, y.dtype
    group = lax.div(head, heads // groups)
    channel = head * head_dim + part * block
    source = plt.load(read_slot.at[row])
    here = pl.ds(part * block, block)
    of_x = Channels(windows_in, channel, inner + channel, block, dtype, weight, bias)
    first_b, first_c = group * size, (groups + group) * size
    of_b, of_c = (Channels(windows_bc, n, 2 * inner + n, size, dtype, weight_bc, bias_bc) for n in (first_b, first_c))
    seen = [channels.window(source) for channels in (of_x, of_b, of_c)]
    state = load_if(source > 0, states_in.at[source, head, here, :], block, size).astype(F32)
    decay, skip = -jnp.exp(plt.load(a_log.at[head]).astype(F32)), plt.load(d.at[head]).astype(F32)
    low, high = dt_limit
    for t in indices(steps):
        live = plt.load(valid.at[row, t])
        target = plt.load(write_slot.at[row, t])
        convolved = []
        for n, channels in enumerate((of_x, of_b, of_c)):
            seen[n] = [*seen[n], channels.input(projected, row, t, live)]
            convolved.append(channels.convolved(seen[n]))
            seen[n] = seen[n][1:]
        x, b, c = convolved
        of_x.write(windows, target, seen[0])
        step = plt.load(projected.at[row, t, 2 * inner + 2 * groups * size + head]) + plt.load(dt_bias.at[head])
        step = jax.nn.softplus(step)
        step = jnp.maximum(step, low) if high == math.inf else jnp.clip(step, low, high)
        step = jnp.where(live, step, 0)
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = (state * jnp.exp(step * decay) + (step * x)[:, None] * b[None, :]).astype(states.dtype)
        state = stored.astype(F32)
        out = jnp.sum(state * c[None, :], axis=1) + skip * x
        plt.store(y.at[row, t, pl.ds(channel, block)], out.astype(dtype))
        store_if(target > 0, states.at[target, head, here, :], stored)
