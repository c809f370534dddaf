"""A Mamba2 layer's decode between its projections for rows that are held by anchors, as two Triton kernels.

As `kernels_pallas.gated_update.pallas_gpu`; the first kernel replays (`kernels_pallas.state_replay.pallas_gpu`) where
that one updates. It writes states, the recurrence's tail, and windows and tail of x; the second one those of B and C.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.gated_update import pallas_gpu as gated_update
from kernels_pallas.state_replay.pallas_gpu import replay
from kernels_pallas.tails import row_numbers
from kernels_pallas.triton_blocks import offsets_overflow, power_of_two_in, update_call
from kernels_pallas.triton_decode import AnchoredRow, Channels, gate, indices, wait

F32 = jnp.float32


def unsupported(*arrays, **options):
    """Returns why this call cannot run, or None."""
    *inputs, store, tail, windows, ring, windows_bc, ring_bc = arrays
    if any(map(offsets_overflow, (*tail, ring, ring_bc))):
        return "offsets into a store do not fit in 32 bits"
    of_update = [*inputs, store, windows, windows_bc]
    return gated_update.unsupported(*of_update)


def gated_replay(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, tail, windows, ring, windows_bc,
    ring_bc, *, dt_limit, eps, norm_before_gate, interpret=False, channels=32, entries=32, **places,
):  # fmt: skip
    """See `api.gated_replay`. `channels` (at most, of a head) go into one program, and `entries` (at most) of a tail
    into one block.
    """
    rows, steps, _, inner = zx.shape
    groups, (heads, head_dim) = bc.shape[3], store.shape[1:3]
    block = power_of_two_in(head_dim, channels)
    # In float32 for dt. The kernels round what zx and bc have rounded.
    projected = jnp.concatenate([v.reshape(rows, steps, -1).astype(F32) for v in (zx, bc, dt)], axis=2)
    numbers = row_numbers(**places)
    few = min(entries, tail.x.shape[1])
    y, store, *new_tail, windows, ring = update_call(
        functools.partial(_replay, groups=groups, block=block, few=few, dt_limit=dt_limit, interpret=interpret),
        "gated_replay",
        (rows, heads, head_dim // block),
        (*numbers, projected, a_log, d, dt_bias, weight, weight_bc, bias, bias_bc, windows_bc, ring_bc),
        jax.ShapeDtypeStruct((rows, steps, inner), zx.dtype),
        (store, *tail, windows, ring),
        interpret=interpret,
    )
    out, windows_bc, ring_bc = gate(
        numbers, projected, y, norm, windows_bc, ring_bc,
        groups=groups, norms=1, eps=eps, norm_before_gate=norm_before_gate, interpret=interpret,
    )  # fmt: skip
    return out, store, type(tail)(*new_tail), windows, ring, windows_bc, ring_bc


def _replay(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, projected, a_log, d, dt_bias, weight,
    weight_bc, bias, bias_bc, windows_bc, ring_bc, states_in, tail_x, tail_b, tail_dt, windows_in, ring_in, y, states,
    new_x, new_b, new_dt, windows, ring, *, groups, block, few, dt_limit, interpret,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = AnchoredRow(row, anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    (_, steps, inner), (_, heads, head_dim, size) = y.shape, states.shape
    repeats, channel = heads // groups, head * head_dim + part * block
    first_b = lax.div(head, repeats) * size
    first_c = groups * size + first_b
    of_x = Channels(windows_in, channel, inner + channel, block, y.dtype, weight, bias, ring_in)
    of_b, of_c = (
        Channels(windows_bc, n, 2 * inner + n, size, y.dtype, weight_bc, bias_bc, ring_bc) for n in (first_b, first_c)
    )
    parts, convolved, dts = (of_x, of_b, of_c), [], []
    seen = [[channels.inputs(projected, row, place, t) for channels in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live = place.live(t)
        convolved.append([jnp.where(live, part.convolved(one), 0) for part, one in zip(parts, inputs, strict=True)])
        of_x.write(place, t, inputs[0], windows, ring)
        dts.append(gated_update.step_size(projected, row, t, head, dt_bias, dt_limit, live))
    values, bs, cs = zip(*convolved, strict=True)
    rate, skip = -jnp.exp(plt.load(a_log.at[head]).astype(F32)), plt.load(d.at[head]).astype(F32)

    def write_y(t, value):
        plt.store(y.at[row, t, pl.ds(channel, block)], value.astype(y.dtype))

    replay(
        place, rate, skip, values, dts, bs, cs, states_in, (tail_x, tail_b, tail_dt), states, (new_x, new_b, new_dt),
        write_y, few=few, repeats=repeats,
    )  # fmt: skip
