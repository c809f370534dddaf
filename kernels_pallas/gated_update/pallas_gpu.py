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
from kernels_pallas.triton_decode import NUMBERS, Channels, SlotRow, gate, indices, wait

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
    places = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32), valid
    y, store, windows = update_call(
        functools.partial(
            _update,
            inner=inner,
            groups=groups,
            size=size,
            block=block,
            dt_limit=dt_limit,
            interpret=interpret,
        ),
        "gated_update",
        (rows, heads, head_dim // block),
        (*places, projected, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, windows_bc),
        jax.ShapeDtypeStruct((rows, steps, inner), dtype),
        (store, windows),
        interpret=interpret,
    )
    out, windows_bc = gate(
        places, projected, y, norm, windows_bc,
        groups=groups, norms=1, eps=eps, norm_before_gate=norm_before_gate, interpret=interpret,
    )  # fmt: skip
    return out, store, windows, windows_bc


def _update(
    read_slot, write_slot, valid, projected, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, windows_bc,
    states_in, windows_in, y, states, windows, *, inner, groups, size, block, dt_limit, interpret,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = SlotRow(row, read_slot, write_slot, valid)
    steps, (_, heads, head_dim, _), dtype = write_slot.shape[1], states.shape, y.dtype
    group = lax.div(head, heads // groups)
    channel = head * head_dim + part * block
    here = pl.ds(part * block, block)
    of_x = Channels(windows_in, channel, inner + channel, block, dtype, weight, bias)
    first_b, first_c = group * size, (groups + group) * size
    of_b, of_c = (Channels(windows_bc, n, 2 * inner + n, size, dtype, weight_bc, bias_bc) for n in (first_b, first_c))
    parts = of_x, of_b, of_c
    state = load_if(place.source > 0, states_in.at[place.source, head, here, :], block, size).astype(F32)
    decay, skip = -jnp.exp(plt.load(a_log.at[head]).astype(F32)), plt.load(d.at[head]).astype(F32)
    seen = [[channels.inputs(projected, row, place, t) for channels in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live, target = place.live(t), place.target(t)
        x, b, c = (channels.convolved(one) for channels, one in zip(parts, inputs, strict=True))
        of_x.write(place, t, inputs[0], windows)
        step = step_size(projected, row, t, head, dt_bias, dt_limit, live)
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = (state * jnp.exp(step * decay) + (step * x)[:, None] * b[None, :]).astype(states.dtype)
        state = stored.astype(F32)
        out = jnp.sum(state * c[None, :], axis=1) + skip * x
        plt.store(y.at[row, t, pl.ds(channel, block)], out.astype(dtype))
        store_if(target > 0, states.at[target, head, here, :], stored)


def step_size(projected, row, t, head, dt_bias, dt_limit, live):
    """Returns a head's step size; it is the projections' last output of the head. 0 for padding."""
    low, high = dt_limit
    at = projected.shape[2] - dt_bias.shape[0] + head
    step = jax.nn.softplus(plt.load(projected.at[row, t, at]) + plt.load(dt_bias.at[head]))
    step = jnp.maximum(step, low) if high == math.inf else jnp.clip(step, low, high)
    return jnp.where(live, step, 0)
