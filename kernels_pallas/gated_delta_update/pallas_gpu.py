"""A gated delta net's decode between its projections, as two Triton kernels.

As `kernels_pallas.gated_update.pallas_gpu`, with queries and keys in place of C and B: each program of the first kernel
convolves and normalises those of its head, and the second one writes their windows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.gated_delta_update.gates import LEAST_BETA, UNIT_EPS
from kernels_pallas.triton_blocks import (
    LEAST_OF_PIECE,
    decayed,
    load_if,
    offsets_overflow,
    pieces,
    power_of_two_in,
    product_with,
    store_if,
    update_call,
)
from kernels_pallas.triton_decode import NUMBERS, Channels, SlotRow, gate, indices, wait

F32 = jnp.float32


def unsupported(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, windows, windows_qk, **options
):  # fmt: skip
    """Returns why this call cannot run, or None."""
    if 0 in (*qk.shape, *v.shape, *windows.shape):
        return "it is empty"
    if any(offsets_overflow(array) for array in (store, windows, windows_qk)):
        return "offsets into a store do not fit in 32 bits"
    if qk.shape[4] % LEAST_OF_PIECE:
        return f"keys have a size of {qk.shape[4]}, not a multiple of {LEAST_OF_PIECE}"
    return None


def gated_delta_update(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, windows, windows_qk, *,
    valid, read_slot, write_slot, gates, interpret=False,
):  # fmt: skip
    """See `api.gated_delta_update`."""
    rows, steps, inner = v.shape
    groups, size = qk.shape[3:]
    heads, head_dim = store.shape[1:3]
    # Several pieces take more registers, for their taps and windows.
    block = power_of_two_in(head_dim, max(NUMBERS // (size * len(pieces(size))), 1))
    # In float32 for a and b. The kernels round what the others have rounded.
    projected = jnp.concatenate([one.reshape(rows, steps, -1).astype(F32) for one in (z, v, qk, a, b)], axis=2)
    places = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32), valid
    y, store, windows = update_call(
        functools.partial(_update, groups=groups, block=block, gates=gates, interpret=interpret),
        "gated_delta_update",
        (rows, heads, head_dim // block),
        (*places, projected, a_log, dt_bias, weight, weight_qk, windows_qk),
        jax.ShapeDtypeStruct((rows, steps, inner), v.dtype),
        (store, windows),
        interpret=interpret,
    )
    out, windows_qk = gate(
        places, projected, y, norm, windows_qk,
        groups=groups, norms=heads // groups, eps=gates.eps, norm_before_gate=True,
        sigmoid=gates.output == "sigmoid", interpret=interpret,
    )  # fmt: skip
    return out, store, windows, windows_qk


def _update(
    read_slot, write_slot, valid, projected, a_log, dt_bias, weight, weight_qk, windows_qk, states_in, windows_in,
    y, states, windows, *, groups, block, gates, interpret,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = SlotRow(row, read_slot, write_slot, valid)
    steps, (_, heads, head_dim, size), dtype = write_slot.shape[1], states.shape, y.dtype
    inner, channel = heads * head_dim, head * head_dim + part * block
    group, here, keys = lax.div(head, heads // groups), pl.ds(part * block, block), pieces(size)
    of_v = Channels(windows_in, channel, inner + channel, block, dtype, weight)
    of_q, of_k = (
        [
            Channels(windows_qk, n + piece.start, 2 * inner + n + piece.start, piece.size, dtype, weight_qk)
            for piece in keys
        ]
        for n in (group * size, (groups + group) * size)
    )
    parts = [of_v, *of_q, *of_k]
    state = [
        load_if(place.source > 0, states_in.at[place.source, head, here, n], block, n.size).astype(F32) for n in keys
    ]
    rate = jnp.exp(plt.load(a_log.at[head]).astype(F32))
    seen = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live, target = place.live(t), place.target(t)
        values, *convolved = [part.convolved(one) for part, one in zip(parts, inputs, strict=True)]
        of_v.write(place, t, inputs[0], windows)
        query, key = unit(convolved[: len(keys)], dtype, size**-0.5), unit(convolved[len(keys) :], dtype)
        logs, beta = decays_and_strength(projected, row, t, head, keys, rate, dt_bias, heads, gates, live)
        old = decayed(state, logs)
        gained = beta * (values - product_with(old, key))
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = [
            (piece + gained[:, None] * one[None, :]).astype(states.dtype) for piece, one in zip(old, key, strict=True)
        ]
        state = [piece.astype(F32) for piece in stored]
        plt.store(y.at[row, t, pl.ds(channel, block)], product_with(state, query).astype(dtype))
        for n, piece in zip(keys, stored, strict=True):
            store_if(target > 0, states.at[target, head, here, n], piece)


def unit(values, dtype, scale=1.0):
    """Scales a vector in pieces to a length, rounded to the dtype."""
    factor = lax.rsqrt(sum(jnp.sum(one * one) for one in values) + UNIT_EPS)
    return [(one * factor * scale).astype(dtype).astype(F32) for one in values]


def decays_and_strength(projected, row, t, head, keys, rate, dt_bias, heads, gates, live):
    """Returns logs of the head's decay (one, or pieces of those of its keys' channels) and its strength; of padding 0.

    They are the last of the projections' outputs.
    """
    decays = dt_bias.shape[0]
    first_b = projected.shape[2] - heads
    first_a, found = first_b - decays, []
    if decays == heads:
        places: list[Any] = [(first_a + head, head)]
    else:
        starts = [(head * (decays // heads) + n.start, n.size) for n in keys]
        places = [(pl.ds(first_a + start, size), pl.ds(start, size)) for start, size in starts]
    for at, bias_at in places:
        log = plt.load(projected.at[row, t, at]) + plt.load(dt_bias.at[bias_at])
        if gates.log_decay_bound is None:
            log = -rate * jax.nn.softplus(log)
        else:
            log = gates.log_decay_bound * jax.nn.sigmoid(rate * log)
        found.append(jnp.where(live, log, 0.0))
    strength = jax.nn.sigmoid(plt.load(projected.at[row, t, first_b + head]))
    return found, jnp.where(live, jnp.maximum(gates.beta_scale * strength, LEAST_BETA), 0.0)
