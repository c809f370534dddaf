"""A gated delta net's decode between its projections for rows that are held by anchors, as two Triton kernels.

As `kernels_pallas.gated_replay.pallas_gpu`, with `kernels_pallas.delta_replay.pallas_gpu` as the replay.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.delta_replay.pallas_gpu import replay
from kernels_pallas.gated_delta_update import pallas_gpu as gated_delta_update
from kernels_pallas.tails import row_numbers
from kernels_pallas.triton_blocks import offsets_overflow, pieces, power_of_two_in, update_call
from kernels_pallas.triton_decode import AnchoredRow, Channels, gate, indices, wait

F32 = jnp.float32


def unsupported(*arrays, **options):
    """Returns why this call cannot run, or None."""
    *inputs, store, tail, windows, ring, windows_qk, ring_qk = arrays
    if any(map(offsets_overflow, (*tail, ring, ring_qk))):
        return "offsets into a store do not fit in 32 bits"
    of_update = [*inputs, store, windows, windows_qk]
    return gated_delta_update.unsupported(*of_update)


def gated_delta_replay(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, tail, windows, ring, windows_qk, ring_qk, *,
    gates, interpret=False, channels=32, entries=16, **places,
):  # fmt: skip
    """See `api.gated_delta_replay`. `channels` (at most, of a head) go into one program, and `entries` (at most) of a
    tail into one block.
    """
    rows, steps, inner = v.shape
    groups, (heads, head_dim) = qk.shape[3], store.shape[1:3]
    block = power_of_two_in(head_dim, channels)
    # In float32 for a and b. The kernels round what the others have rounded.
    projected = jnp.concatenate([one.reshape(rows, steps, -1).astype(F32) for one in (z, v, qk, a, b)], axis=2)
    numbers = row_numbers(**places)
    y, store, *new_tail, windows, ring = update_call(
        functools.partial(
            _replay, groups=groups, block=block, few=min(entries, tail.u.shape[1]), gates=gates, interpret=interpret
        ),
        "gated_delta_replay",
        (rows, heads, head_dim // block),
        (*numbers, projected, a_log, dt_bias, weight, weight_qk, windows_qk, ring_qk),
        jax.ShapeDtypeStruct((rows, steps, inner), v.dtype),
        (store, *tail, windows, ring),
        interpret=interpret,
    )
    out, windows_qk, ring_qk = gate(
        numbers, projected, y, norm, windows_qk, ring_qk,
        groups=groups, norms=heads // groups, eps=gates.eps, norm_before_gate=True,
        sigmoid=gates.output == "sigmoid", interpret=interpret,
    )  # fmt: skip
    return out, store, type(tail)(*new_tail), windows, ring, windows_qk, ring_qk


def _replay(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, projected, a_log, dt_bias, weight, weight_qk,
    windows_qk, ring_qk, states_in, tail_u, tail_k, tail_decay, windows_in, ring_in, y, states, new_u, new_k,
    new_decay, windows, ring, *, groups, block, few, gates, interpret,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = AnchoredRow(row, anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    (_, steps, inner), (_, heads, head_dim, size), dtype = y.shape, states.shape, y.dtype
    repeats, channel, keys = heads // groups, head * head_dim + part * block, pieces(size)
    group = lax.div(head, repeats)
    of_v = Channels(windows_in, channel, inner + channel, block, dtype, weight, ring=ring_in)
    of_qk = [
        Channels(windows_qk, n + at.start, 2 * inner + n + at.start, at.size, dtype, weight_qk, ring=ring_qk)
        for n in (group * size, (groups + group) * size)
        for at in keys
    ]
    rate, parts, tokens = jnp.exp(plt.load(a_log.at[head]).astype(F32)), [of_v, *of_qk], []
    seen = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live = place.live(t)
        value, *convolved = [jnp.where(live, part.convolved(one), 0) for part, one in zip(parts, inputs, strict=True)]
        of_v.write(place, t, inputs[0], windows, ring)
        query, key = (
            gated_delta_update.unit(convolved[: len(keys)], dtype, size**-0.5),
            gated_delta_update.unit(convolved[len(keys) :], dtype),
        )
        logs, beta = gated_delta_update.decays_and_strength(
            projected, row, t, head, keys, rate, dt_bias, heads, gates, live
        )
        tokens.append((value, key, query, beta, logs))
    values, ks, qs, shares, logs = map(list, zip(*tokens, strict=True))

    def write_y(t, value):
        plt.store(y.at[row, t, pl.ds(channel, block)], value.astype(dtype))

    replay(
        place, values, ks, qs, shares, logs, states_in, (tail_u, tail_k, tail_decay), states,
        (new_u, new_k, new_decay), write_y, few=few, repeats=repeats,
    )  # fmt: skip
