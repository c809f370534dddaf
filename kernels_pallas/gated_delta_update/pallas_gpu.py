"""A gated delta net's decode between its projections, as two Triton kernels.

As `kernels_pallas.gated_update.pallas_gpu`, with queries and keys in place of C and B: each program of the first kernel
convolves and normalises those of its head, and the second one writes their windows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.gated_delta_update.gates import LEAST_BETA, UNIT_EPS
from kernels_pallas.triton_blocks import (
    LEAST_OF_PIECE,
    load_if,
    offsets_overflow,
    pieces,
    power_of_two_in,
    product_with,
    store_if,
    update_call,
)
from kernels_pallas.triton_decode import NUMBERS, Channels, gate, indices

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
    slots = read_slot.astype(jnp.int32), write_slot.astype(jnp.int32)
    y, store, windows = update_call(
        functools.partial(_update, groups=groups, block=block, gates=gates),
        "gated_delta_update",
        (rows, heads, head_dim // block),
        (*slots, valid, projected, a_log, dt_bias, weight, weight_qk, windows_qk),
        jax.ShapeDtypeStruct((rows, steps, inner), v.dtype),
        (store, windows),
        interpret=interpret,
    )
    out, windows_qk = gate(
        *slots, valid, projected, y, norm, windows_qk,
        groups=groups, norms=heads // groups, eps=gates.eps, norm_before_gate=True,
        sigmoid=gates.output == "sigmoid", interpret=interpret,
    )  # fmt: skip
    return out, store, windows, windows_qk


def _update(
    read_slot, write_slot, valid, projected, a_log, dt_bias, weight, weight_qk, windows_qk, states_in, windows_in,
    y, states, windows, *, groups, block, gates,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    steps, (_, heads, head_dim, size), dtype = write_slot.shape[1], states.shape, y.dtype
    inner, channel = heads * head_dim, head * head_dim + part * block
    group, here, keys = lax.div(head, heads // groups), pl.ds(part * block, block), pieces(size)
    by_channel = dt_bias.shape[0] != heads
    source = plt.load(read_slot.at[row])
    of_v = Channels(windows_in, channel, inner + channel, block, dtype, weight)
    of_q, of_k = (
        [
            Channels(windows_qk, n + piece.start, 2 * inner + n + piece.start, piece.size, dtype, weight_qk)
            for piece in keys
        ]
        for n in (group * size, (groups + group) * size)
    )
    parts = [of_v, *of_q, *of_k]
    seen = [one.window(source) for one in parts]
    state = [load_if(source > 0, states_in.at[source, head, here, n], block, n.size).astype(F32) for n in keys]
    rate = jnp.exp(plt.load(a_log.at[head]).astype(F32))
    first_a = 2 * inner + 2 * groups * size
    # Of the head, or of each channel of its keys: in the projections' outputs, and in the bias.
    at, bias_at = (
        [pl.ds(first + head * size + n.start, n.size) if by_channel else first + head for n in keys]
        for first in (first_a, 0)
    )
    for t in indices(steps):
        live, target = plt.load(valid.at[row, t]), plt.load(write_slot.at[row, t])
        seen = [[*one, part.input(projected, row, t, live)] for one, part in zip(seen, parts, strict=True)]
        values, *convolved = [part.convolved(one) for one, part in zip(seen, parts, strict=True)]
        seen = [one[1:] for one in seen]
        of_v.write(windows, target, seen[0])
        query, key = _unit(convolved[: len(keys)], dtype, size**-0.5), _unit(convolved[len(keys) :], dtype)
        strength = plt.load(projected.at[row, t, first_a + dt_bias.shape[0] + head])
        beta = jnp.where(live, jnp.maximum(gates.beta_scale * jax.nn.sigmoid(strength), LEAST_BETA), 0.0)
        old = []
        for piece, of_a, of_bias in zip(state, at, bias_at, strict=True):
            logs = plt.load(projected.at[row, t, of_a]) + plt.load(dt_bias.at[of_bias])
            if gates.log_decay_bound is None:
                logs = -rate * jax.nn.softplus(logs)
            else:
                logs = gates.log_decay_bound * jax.nn.sigmoid(rate * logs)
            old.append(piece * jnp.exp(jnp.where(live, logs, 0.0)))
        gained = beta * (values - product_with(old, key))
        # Rounded as it is stored, so that several steps in one call equal one step in each of several calls.
        stored = [
            (piece + gained[:, None] * one[None, :]).astype(states.dtype) for piece, one in zip(old, key, strict=True)
        ]
        state = [piece.astype(F32) for piece in stored]
        plt.store(y.at[row, t, pl.ds(channel, block)], product_with(state, query).astype(dtype))
        for n, piece in zip(keys, stored, strict=True):
            store_if(target > 0, states.at[target, head, here, n], piece)


def _unit(values, dtype, scale=1.0):
    """Scales a vector in pieces to a length, rounded to the dtype."""
    factor = lax.rsqrt(sum(jnp.sum(one * one) for one in values) + UNIT_EPS)
    return [(one * factor * scale).astype(dtype).astype(F32) for one in values]
