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
from typing import Any, NamedTuple

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
    return triton.unsupported(store.shape[3], *jax.tree.leaves((store, stores)))


def gated_update(projections, weights, store, windows, rows, *, valid, gates, interpret=False):
    size = store.shape[3]
    # Several pieces take more registers, for their taps and windows.
    block = triton.power_of_two_in(store.shape[2], max(NUMBERS // (size * len(triton.pieces(size))), 1))
    places = rows.read_slot.astype(jnp.int32), rows.write_slot.astype(jnp.int32), valid
    out, (store, of_value), (of_vectors,) = _both_kernels(
        "gated_update", places, projections, weights, windows, (store, windows.value),
        block=block, gates=gates, interpret=interpret,
    )  # fmt: skip
    return out, store, type(windows)(of_value, of_vectors)


def gated_replay(projections, weights, store, tail, windows, places, *, gates, interpret=False):
    numbers, rings = row_numbers(places), [ring for ring in tail if ring is not None]
    out, (store, *rings, of_value, value_ring), (of_vectors, vector_ring) = _both_kernels(
        "gated_replay", numbers, projections, weights, windows, (store, *rings, windows.value, windows.value_ring),
        block=triton.power_of_two_in(store.shape[2], triton.CHANNELS), gates=gates, interpret=interpret,
    )  # fmt: skip
    return out, store, type(tail)(*rings), type(windows)(of_value, of_vectors, value_ring, vector_ring)


def _both_kernels(name, places, projections, weights, windows, stores, *, block, gates, interpret):
    """Returns the output, the stores, and windows and, if there is one, ring of the vectors."""
    (rows, steps, inner), (_, heads, head_dim, _) = projections.value.shape, stores[0].shape
    if rows * steps == 1:
        # XLA turns a product of one token with few outputs into sums. Without this, each sum is one thread's work in
        # the copy below: 117 us of a layer of Nemotron-H-8B on an H100, in place of about 10.
        decay, strength = lax.optimization_barrier((projections.decay, projections.strength))
        projections = projections._replace(decay=decay, strength=strength)
    # In float32 for decays and strengths. The kernels round what the others have rounded.
    projected = jnp.concatenate([v.reshape(rows, steps, -1).astype(F32) for v in projections if v is not None], axis=2)
    options = {"groups": projections.vectors.shape[3], "gates": gates, "interpret": interpret}
    y, *stores = triton.update_call(
        functools.partial(_kernel, block=block, places=len(places), **options), name, (rows, heads, head_dim // block),
        (*places, projected, *weights[:-1], windows.vectors, windows.vector_ring),
        jax.ShapeDtypeStruct((rows, steps, inner), projections.value.dtype), stores, interpret=interpret,
    )  # fmt: skip
    out, *of_vectors = gated_norm(places, projected, y, weights, windows, **options)
    return out, stores, of_vectors


class _Layer(NamedTuple):
    """References of the first kernel: the projections' outputs and the weights."""

    projected: Any
    a_log: Any
    dt_bias: Any
    skip: Any
    value_taps: Any
    value_bias: Any
    vector_taps: Any
    vector_bias: Any
    vector_windows: Any
    vector_ring: Any


def _kernel(*refs, places, groups, block, gates, interpret):
    """Replays if there is a ring, updates otherwise."""
    row, head, part = (pl.program_id(axis) for axis in range(3))
    layer, stores = _Layer(*refs[places : places + len(_Layer._fields)]), refs[places + len(_Layer._fields) :]
    anchored = layer.vector_ring is not None
    place = (AnchoredRow if anchored else SlotRow)(row, *refs[:places])
    given, y, written = stores[: len(stores) // 2], stores[len(stores) // 2], stores[len(stores) // 2 + 1 :]
    (states_in, *tail, windows_in, ring_in), (states, *new_tail, windows, ring) = (
        of if anchored else (*of, None) for of in (given, written)
    )
    here = pl.ds(part * block, block)
    state = None if anchored else load_state(place, states_in, head, here)
    tokens = _tokens(
        place, layer, states.shape, y.dtype, windows_in, ring_in, windows, ring,
        groups=groups, block=block, gates=gates, interpret=interpret,
    )  # fmt: skip

    def write_y(t, value):
        plt.store(y.at[row, t, pl.ds(head * states.shape[2] + part * block, block)], value.astype(y.dtype))

    skip = None if layer.skip is None else plt.load(layer.skip.at[head]).astype(F32)
    if anchored:
        repeats = states.shape[1] // groups
        replay_head(place, tokens, skip, states_in, tail, states, new_tail, write_y, repeats=repeats, erase=gates.erase)
    else:
        update_head(place, state, tokens, skip, states, write_y, erase=gates.erase)


def _tokens(
    place, layer, states, dtype, windows_in, ring_in, windows, ring, *, groups, block, gates, interpret
):  # fmt: skip
    """Convolves the program's channels and writes their windows. Returns value, query, key, strength and logs of decays
    of each step: float32, zeros for padding, vectors and decays by channel in pieces.
    """
    row, head, part = (pl.program_id(axis) for axis in range(3))
    (_, heads, head_dim, size), steps = states, layer.projected.shape[1]
    inner, channel, keys = heads * head_dim, head * head_dim + part * block, triton.pieces(size)
    group = lax.div(head, heads // groups)
    of_value = Channels(windows_in, channel, inner + channel, block, dtype, layer.value_taps, layer.value_bias, ring_in)
    of_vectors = [
        Channels(
            layer.vector_windows, n + at.start, 2 * inner + n + at.start, at.size, dtype, layer.vector_taps,
            layer.vector_bias, layer.vector_ring,
        )
        for n in (group * size, (groups + group) * size)
        for at in keys
    ]  # fmt: skip
    rate, parts, tokens = jnp.exp(plt.load(layer.a_log.at[head]).astype(F32)), [of_value, *of_vectors], []
    seen = [[part.inputs(layer.projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, inputs in zip(indices(steps), seen, strict=True):
        live = place.live(t)
        value, *vectors = [jnp.where(live, part.convolved(one), 0) for part, one in zip(parts, inputs, strict=True)]
        of_value.write(place, t, inputs[0], windows, *([] if ring is None else [ring]))
        query, key = vectors[: len(keys)], vectors[len(keys) :]
        if gates.erase:
            query, key = _unit(query, dtype, size**-0.5), _unit(key, dtype)
        else:
            query, key = key, query
        logs, strength = _decays_and_strength(layer, row, t, head, keys, rate, gates)
        tokens.append((value, query, key, jnp.where(live, strength, 0.0), [jnp.where(live, v, 0.0) for v in logs]))
    return tokens


def _unit(values, dtype, scale=1.0):
    """Scales a vector in pieces to a length, rounded to the dtype."""
    factor = lax.rsqrt(sum(jnp.sum(one * one) for one in values) + UNIT_EPS)
    return [(one * factor * scale).astype(dtype).astype(F32) for one in values]


def _decays_and_strength(layer, row, t, head, keys, rate, gates):
    """Returns logs of the head's decay (one, or pieces of those of its keys' channels) and its strength, of the last of
    the projections' outputs.
    """

    def given(at, bias_at=None):
        value = plt.load(layer.projected.at[row, t, at])
        return value if bias_at is None else value + plt.load(layer.dt_bias.at[bias_at])

    heads, decays = layer.a_log.shape[0], layer.dt_bias.shape[0]
    of_strengths = layer.projected.shape[2] - heads
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


def gated_norm(places, projected, y, weights, windows, *, groups, gates, interpret):
    """Returns the output, and windows and, if there is one, ring of the vectors.

    `places` are arguments of `SlotRow`, or, with a ring, of `AnchoredRow`. The projections' outputs `projected` have
    gates at 0, and the inputs of the vectors' convolution at 2 * inner.
    """
    (rows, _, inner), norm = y.shape, weights.norm
    stores = (windows.vectors,) if windows.vector_ring is None else (windows.vectors, windows.vector_ring)
    body = functools.partial(
        _norm_kernel, stores=len(stores), groups=groups, norms=weights.a_log.shape[0] // groups if gates.erase else 1,
        gates=gates, normalized=norm is not None, interpret=interpret,
    )  # fmt: skip
    return triton.update_call(
        body, "gated_norm", (rows, groups), (*places, projected, y, jnp.ones(1, y.dtype) if norm is None else norm),
        jax.ShapeDtypeStruct(y.shape, y.dtype), stores, interpret=interpret, warps=1 if inner // groups <= 256 else 4,
    )  # fmt: skip


def _norm_kernel(*refs, stores, groups, norms, gates, normalized, interpret):
    *places, projected, y, norm = refs[: -2 * stores - 1]
    windows_in, *ring_in = refs[-2 * stores - 1 : -stores - 1]
    out, *written = refs[-stores - 1 :]
    row, group = pl.program_id(0), pl.program_id(1)
    place = (AnchoredRow if ring_in else SlotRow)(row, *places)
    steps, inner, dtype, size = y.shape[1], y.shape[2], y.dtype, windows_in.shape[2] // (2 * groups)
    ring = ring_in[0] if ring_in else None
    starts = [((n * groups + group) * size + at.start, at.size) for n in range(2) for at in triton.pieces(size)]
    parts = [Channels(windows_in, n, 2 * inner + n, count, dtype, ring=ring) for n, count in starts]
    inputs = [[part.inputs(projected, row, place, t) for part in parts] for t in indices(steps)]
    wait(interpret)
    for t, of_step in zip(indices(steps), inputs, strict=True):
        for part, one in zip(parts, of_step, strict=True):
            part.write(place, t, one, *written)
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
