"""The replay as one Triton kernel: each program takes some channels of one head of one row.

A program loads the anchor into registers once and computes all new tokens' outputs from it. It computes scores (C with
B) and then outputs (scores with x) of the tail's tokens in blocks of `entries`, and loads only valid entries. Log
decays are summed from each token to the present, never subtracted. Once per interval, a program computes the state that
is due by the recurrence, token after token. States and tails are input and output in one buffer. Accesses to slot 0 and
tail 0 are masked: the kernel neither reads nor writes them.

Rows run in parallel, which is why no row may write a slot that another row reads (`kernels_pallas.slots`). The heads of
a group run in parallel too, and share one entry of B in the tail: they take B of new tokens from the inputs, and one
program writes it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.tails import row_numbers
from kernels_pallas.triton_blocks import (
    is_power_of_two,
    load_if,
    offsets_overflow,
    power_of_two_in,
    store_if,
    update_call,
)
from kernels_pallas.triton_decode import AnchoredRow, indices

F32 = jnp.float32


def unsupported(states, tail, x, dt, a, b, c, d, **places):
    """Returns why this call cannot run, or None."""
    if 0 in (*x.shape, *b.shape):
        return "it is empty"
    if offsets_overflow(states) or any(map(offsets_overflow, tail)):
        return "offsets into the store do not fit in 32 bits"
    if not is_power_of_two(b.shape[3]):
        return f"the state size is {b.shape[3]}, not a power of two"
    return None


def state_replay(
    states, tail, x, dt, a, b, c, d, *, interpret=False, channels=32, entries=32, warps=4, **places,
):  # fmt: skip
    """See `api.state_replay`. `channels` (at most, of a head) go into one program of `warps` warps, and `entries` (at
    most) of a tail into one block.
    """
    rows, _, heads, head_dim = x.shape
    block = power_of_two_in(head_dim, channels)
    y, states, *new_tail = update_call(
        functools.partial(_kernel, block=block, few=min(entries, tail.x.shape[1]), repeats=heads // b.shape[2]),
        "state_replay",
        (rows, heads, head_dim // block),
        (*row_numbers(**places), x, dt.astype(F32), a.astype(F32), b, c, d.astype(F32)),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        (states, *tail),
        interpret=interpret,
        warps=warps,
    )
    return y, states, type(tail)(*new_tail)


def _kernel(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, x, dt, a, b, c, d, state_in, tail_x, tail_b,
    tail_dt, y, state_out, new_x, new_b, new_dt, *, block: int, few: int, repeats: int,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = AnchoredRow(row, anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    group, times = lax.div(head, repeats), list(indices(x.shape[1]))
    here = pl.ds(part * block, block)
    # The new tokens; padding may hold NaN, so it is not loaded.
    values = [load_if(place.live(t), x.at[row, t, head, here], block).astype(F32) for t in times]
    bs, cs = ([load_if(place.live(t), v.at[row, t, group, :], v.shape[3]).astype(F32) for t in times] for v in (b, c))
    dts = [jnp.where(place.live(t), plt.load(dt.at[row, t, head]), 0.0) for t in times]

    def write_y(t, value):
        plt.store(y.at[row, t, head, here], jnp.where(place.live(t), value, 0.0).astype(y.dtype))

    replay(
        place, plt.load(a.at[head]), plt.load(d.at[head]), values, dts, bs, cs, state_in, (tail_x, tail_b, tail_dt),
        state_out, (new_x, new_b, new_dt), write_y, few=few, repeats=repeats,
    )  # fmt: skip


def replay(place, rate, skip, values, dts, bs, cs, state_in, tail, state_out, new_tail, write_y, *, few, repeats):
    """Replays some channels of the program's head, inside a kernel.

    Args:
        place: `AnchoredRow`.
        rate, skip: a and d of the head.
        values, dts, bs, cs: of the new tokens, float32; zeros for padding, and values rounded as the tail keeps them.
        write_y: takes a step and its output. It is called early: outputs would otherwise occupy registers to the end.
        few: so many entries of the tail are in one block.
        repeats: heads that share B and C.
    """
    head, part = pl.program_id(1), pl.program_id(2)
    (tail_x, tail_b, tail_dt), (new_x, new_b, new_dt) = tail, new_tail
    steps, block, entries, size = len(values), values[0].shape[0], tail_x.shape[1], state_in.shape[3]
    here, first, start, ring_of = pl.ds(part * block, block), place.first, place.start, place.tail
    inner = pl.ds(head * state_in.shape[2] + part * block, block)
    keys = pl.ds(lax.div(head, repeats) * size, size)

    def load_anchor():
        return load_if(place.source > 0, state_in.at[place.source, head, here, :], block, size).astype(F32)

    decays = [dts[t] * rate for t in range(steps)]  # in logs
    since = [sum(decays[1 : t + 1], decays[0]) for t in range(steps)]  # from the tail's last token to each

    # The tail's tokens before them.
    def position(span, size):
        entry = lax.broadcasted_iota(jnp.int32, (size,), 0) + span
        return first + ((entry - first) & (entries - 1))

    everywhere = position(0, entries)
    tail_decay = load_if(everywhere < start, tail_dt.at[ring_of, pl.ds(0, entries), head], entries) * rate
    whole = jnp.sum(tail_decay)
    state = load_anchor()
    out = [jnp.exp(whole + since[t]) * jnp.sum(state * cs[t][None, :], axis=1) + skip * values[t] for t in range(steps)]
    for offset in range(0, entries, few):
        span = pl.ds(offset, few)
        at = position(offset, few)
        valid = at < start
        old_x = load_if(valid[:, None], tail_x.at[ring_of, span, inner], few, block).astype(F32)
        old_b = load_if(valid[:, None], tail_b.at[ring_of, span, keys], few, size).astype(F32)
        old_dt = load_if(valid, tail_dt.at[ring_of, span, head], few)
        later = jnp.sum(jnp.where(everywhere[None, :] > at[:, None], tail_decay[None, :], 0.0), axis=1)
        for t in range(steps):
            scores = jnp.sum(old_b * cs[t][None, :], axis=1)
            weights = jnp.where(valid, scores * old_dt * jnp.exp(later + since[t]), 0.0)
            out[t] += jnp.sum(weights[:, None] * old_x, axis=0)
    for t, step in enumerate(indices(steps)):
        for n in range(t + 1):
            between = sum(decays[n + 1 : t + 1], jnp.float32(0))
            out[t] += jnp.sum(cs[t] * bs[n]) * dts[n] * jnp.exp(between) * values[n]
        write_y(step, out[t])

    for t, step in enumerate(indices(steps)):
        entry, live = place.entry(tail_x, step), place.live(step)
        store_if(live, new_x.at[ring_of, entry, inner], values[t].astype(new_x.dtype))
        one = live & (part == 0)
        plt.store(new_dt.at[ring_of, entry, head], dts[t], mask=one)
        store_if(one & (lax.rem(head, repeats) == 0), new_b.at[ring_of, entry, keys], bs[t].astype(new_b.dtype))

    @pl.when(place.due_slot > 0)
    def _():
        def absorb(state, step, token_x, token_b):
            return state * jnp.exp(step * rate) + (step * token_x)[:, None] * token_b[None, :]

        def replayed(n, state):
            entry = n & (entries - 1)
            of_token = plt.load(tail_x.at[ring_of, entry, inner]), plt.load(tail_b.at[ring_of, entry, keys])
            return absorb(state, plt.load(tail_dt.at[ring_of, entry, head]), *(v.astype(F32) for v in of_token))

        written = lax.fori_loop(first, start, replayed, load_anchor())  # loaded again, to free its registers in between
        for t in range(steps):
            before = start + t < place.due
            step = jnp.where(before, dts[t], 0.0)
            written = absorb(written, step, values[t], bs[t])
        plt.store(state_out.at[place.due_slot, head, here, :], written.astype(state_out.dtype))
