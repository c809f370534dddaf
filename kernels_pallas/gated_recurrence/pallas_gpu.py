"""A layer's decode between its projections, as two Triton kernels.

1. Each program takes some channels of one head of one row: convolves them, and the vectors of the head's group, and
   updates the state or replays (`kernels_pallas.recurrence`). It writes states, windows and tails of values, and y. The
   vectors are convolved once for each program, which costs little: their taps and windows are a tenth of a program's
   states.
2. Gates and normalizes y, and writes the vectors' windows and tails (`gated_norm`): one program for each row and
   group writes those that programs of several heads read in the first kernel.

Both read one array with all of the projections' outputs: XLA writes it as one kernel, or not at all where the merged
product already has it. A program reads its channels before it writes them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import triton_blocks as triton
from kernels_pallas.gated_recurrence.gates import UNIT_EPS
from kernels_pallas.recurrence.replay.pallas_gpu import replay_head
from kernels_pallas.recurrence.update.pallas_gpu import load_state, update_head
from kernels_pallas.tails import row_numbers
from kernels_pallas.triton_decode import F32, AnchoredRow, Channels, SlotRow, indices, masked, wait

NUMBERS = 4096  # of a state in one program, at most: a thread holds 32 of them


def unsupported(projections, weights, store, *stores_and_places, **options):
    *stores, _ = stores_and_places
    return triton.unsupported(store.shape[3], store, stores)


def gated_update(projections, weights, store, windows, rows, *, valid, gates, interpret=False):
    size = store.shape[3]
    # Several pieces take more registers, for their taps and windows.
    block = triton.power_of_two_in(store.shape[2], max(NUMBERS // (size * len(triton.pieces(size))), 1))
    places = rows.read_slot.astype(jnp.int32), rows.write_slot.astype(jnp.int32), valid
    out, store, _, windows = _both_kernels(
        "gated_update", places, projections, weights, windows, store, None, block=block, gates=gates,
        interpret=interpret,
    )  # fmt: skip
    return out, store, windows


def gated_replay(projections, weights, store, tail, windows, places, *, gates, interpret=False):
    block = triton.power_of_two_in(store.shape[2], triton.CHANNELS)
    return _both_kernels(
        "gated_replay", row_numbers(places), projections, weights, windows, store, tail, block=block, gates=gates,
        interpret=interpret,
    )  # fmt: skip


def _both_kernels(name, places, projections, weights, windows, store, tail, *, block, gates, interpret):
    """Returns the output, the store, the tail and the windows; updates if the tail is None."""
    (rows, steps, inner), (_, heads, head_dim, _) = projections.value.shape, store.shape
    if rows * steps == 1:
        # XLA turns a product of one token with few outputs into sums. Without this, each sum is one thread's work in
        # the copy below: 117 us of a layer of Nemotron-H-8B on an H100, in place of about 10.
        decay, strength = lax.optimization_barrier((projections.decay, projections.strength))
        projections = projections._replace(decay=decay, strength=strength)
    # In float32 for decays and strengths. The kernels round what the others have rounded.
    projected = jnp.concatenate([v.reshape(rows, steps, -1).astype(F32) for v in projections if v is not None], axis=2)
    options = {"groups": projections.vectors.shape[3], "gates": gates, "interpret": interpret}
    of_value = windows._replace(vectors=None, vector_ring=None)
    of_vectors = windows._replace(value=None, value_ring=None)
    y, store, tail, of_value = triton.update_call(
        functools.partial(_kernel, block=block, **options), name, (rows, heads, head_dim // block),
        (places, projected, weights._replace(norm=None), of_vectors),
        jax.ShapeDtypeStruct((rows, steps, inner), projections.value.dtype), (store, tail, of_value),
        interpret=interpret,
    )  # fmt: skip
    out, of_vectors = gated_norm(places, projected, y, weights, of_vectors, **options)
    windows = of_value._replace(vectors=of_vectors.vectors, vector_ring=of_vectors.vector_ring)
    return out, store, tail, windows


def _kernel(
    places, projected, weights, of_vectors, states_in, tail, of_value, y, states, new_tail, new_windows, *,
    groups, block, gates, interpret,
):  # fmt: skip
    """Replays if there is a tail, updates otherwise. `of_vectors` and `of_value`: windows and rings."""
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = (SlotRow if tail is None else AnchoredRow)(row, *places)
    here = pl.ds(part * block, block)
    state = load_state(place, states_in, head, here) if tail is None else None
    tokens = _tokens(
        place, projected, weights, of_vectors, of_value, new_windows, states.shape, y.dtype,
        groups=groups, block=block, gates=gates, interpret=interpret,
    )  # fmt: skip

    def write_y(t, value):
        plt.store(y.at[row, t, pl.ds(head * states.shape[2] + part * block, block)], value.astype(y.dtype))

    skip = None if weights.skip is None else plt.load(weights.skip.at[head]).astype(F32)
    if tail is None:
        update_head(place, state, tokens, skip, states, write_y, erase=gates.erase)
    else:
        repeats = states.shape[1] // groups
        replay_head(place, tokens, skip, states_in, tail, states, new_tail, write_y, repeats=repeats, erase=gates.erase)


def _tokens(
    place, projected, weights, of_vectors, of_value, new_windows, states, dtype, *, groups, block, gates, interpret
):  # fmt: skip
    """Convolves the program's channels and writes their windows. Returns value, query, key, strength and logs of decays
    of each step: float32, zeros for padding, vectors and decays by channel in pieces.
    """
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, heads, head_dim, size), steps = states, projected.shape[1]
    inner, channel, keys = heads * head_dim, head * head_dim + part * block, triton.pieces(size)
    group = lax.div(head, heads // groups)
    values = Channels(
        of_value.value, channel, inner + channel, block, dtype, weights.value_taps, weights.value_bias,
        of_value.value_ring,
    )  # fmt: skip
    vectors = [
        Channels(
            of_vectors.vectors, n + at.start, 2 * inner + n + at.start, at.size, dtype, weights.vector_taps,
            weights.vector_bias, of_vectors.vector_ring,
        )
        for n in (group * size, (groups + group) * size)
        for at in keys
    ]  # fmt: skip
    rate, parts, tokens = jnp.exp(plt.load(weights.a_log.at[head]).astype(F32)), [values, *vectors], []
    seen = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live = place.live(t)
        value, *found = [jnp.where(live, part.convolved(one), 0) for part, one in zip(parts, inputs, strict=True)]
        values.write(place, t, inputs[0], new_windows.value, new_windows.value_ring)
        query, key = found[: len(keys)], found[len(keys) :]
        if gates.erase:
            query, key = _unit(query, dtype, size**-0.5), _unit(key, dtype)
        else:
            query, key = key, query
        logs, strength = _decays_and_strength(projected, weights, row, t, head, keys, rate, gates)
        tokens.append((value, query, key, jnp.where(live, strength, 0.0), [jnp.where(live, v, 0.0) for v in logs]))
    return tokens


def _unit(values, dtype, scale=1.0):
    """Scales a vector in pieces to a length, rounded to the dtype."""
    factor = lax.rsqrt(sum(jnp.sum(one * one) for one in values) + UNIT_EPS)
    return [(one * factor * scale).astype(dtype).astype(F32) for one in values]


def _decays_and_strength(projected, weights, row, t, head, keys, rate, gates):
    """Returns logs of the head's decay (one, or pieces of those of its keys' channels) and its strength, of the last of
    the projections' outputs.
    """

    def given(at, bias_at=None):
        value = plt.load(projected.at[row, t, at])
        return value if bias_at is None else value + plt.load(weights.dt_bias.at[bias_at])

    heads, decays = weights.a_log.shape[0], weights.dt_bias.shape[0]
    of_strengths = projected.shape[2] - heads
    if not gates.erase:
        strength = gates.strength(given(of_strengths + head, head))
        return [-rate * strength], strength
    first = of_strengths - decays
    if decays == heads:
        logs = [gates.log_decay(given(first + head, head), rate)]
    else:
        starts = [(head * (decays // heads) + n.start, n.size) for n in keys]
        logs = [gates.log_decay(given(pl.ds(first + n, size), pl.ds(n, size)), rate) for n, size in starts]
    return logs, gates.strength(given(of_strengths + head))


def gated_norm(places, projected, y, weights, of_vectors, *, groups, gates, interpret):
    """Returns the output, and windows and, if there is one, ring of the vectors.

    `places` are arguments of `SlotRow`, or, with a ring, of `AnchoredRow`. The projections' outputs `projected` have
    gates at 0, and the inputs of the vectors' convolution at 2 * inner.
    """
    (rows, _, inner), norm = y.shape, weights.norm
    body = functools.partial(
        _norm_kernel, groups=groups, norms=weights.a_log.shape[0] // groups if gates.erase else 1, gates=gates,
        normalized=norm is not None, interpret=interpret,
    )  # fmt: skip
    return triton.update_call(
        body, "gated_norm", (rows, groups), (places, projected, y, jnp.ones(1, y.dtype) if norm is None else norm),
        jax.ShapeDtypeStruct(y.shape, y.dtype), (of_vectors,), interpret=interpret,
        warps=1 if inner // groups <= 256 else 4,
    )  # fmt: skip


def _norm_kernel(places, projected, y, norm, windows, out, new_windows, *, groups, norms, gates, normalized, interpret):
    row, group, ring = pl.program_id(0), pl.program_id(1), windows.vector_ring
    place = (SlotRow if ring is None else AnchoredRow)(row, *places)
    steps, inner, dtype, size = y.shape[1], y.shape[2], y.dtype, windows.vectors.shape[2] // (2 * groups)
    starts = [((n * groups + group) * size + at.start, at.size) for n in range(2) for at in triton.pieces(size)]
    parts = [Channels(windows.vectors, n, 2 * inner + n, count, dtype, ring=ring) for n, count in starts]
    inputs = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, of_step in zip(indices(steps), inputs, strict=True):
        for part, one in zip(parts, of_step, strict=True):
            part.write(place, t, one, new_windows.vectors, new_windows.vector_ring)
    of_norm = inner // groups // norms
    piece, index = (jnp.arange(pl.next_power_of_2(n), dtype=jnp.int32) for n in (norms, of_norm))
    inside = (piece < norms)[:, None] & (index < of_norm)[None, :]
    channel = group * (inner // groups) + piece[:, None] * of_norm + index[None, :]
    scale: Any = 1.0
    if normalized:
        at = channel if norm.shape[0] == inner else jnp.where(inside, index[None, :], 0)
        scale = masked(norm.at[at], inside).astype(F32)

    def one_step(t, _):
        value = masked(y.at[row, t, channel], inside).astype(F32)
        z = masked(projected.at[row, t, channel], inside).astype(dtype).astype(F32)
        factor = jax.nn.sigmoid(z) if gates.erase and gates.activation == "sigmoid" else jax.nn.silu(z)
        value = value if gates.norm_before_gate and normalized else value * factor
        if normalized:
            value = value * lax.rsqrt(jnp.sum(value * value, axis=1)[:, None] / of_norm + gates.eps) * scale
            value = value * factor if gates.norm_before_gate else value
        plt.store(out.at[row, t, channel], value.astype(dtype), mask=inside)
        return 0

    lax.fori_loop(0, steps, one_step, 0)
