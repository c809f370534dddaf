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

from kernels_pallas import tails
from kernels_pallas.triton_blocks import is_power_of_two, load_if, offsets_overflow, power_of_two_in, store_if

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
    states, tail, x, dt, a, b, c, d, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot, interval,
    interpret=False, channels=32, entries=32, warps=4,
):  # fmt: skip
    """See `api.state_replay`. `channels` (at most, of a head) go into one program of `warps` warps, and `entries` (at
    most) of a tail into one block.
    """
    rows, _, heads, head_dim = x.shape
    block = power_of_two_in(head_dim, channels)
    due = tails.next_boundary(length, num_tokens, interval)
    live = num_tokens > 0
    scalars = (
        jnp.where(live, anchor_slot, 0), tail_id, anchor_length, length, num_tokens,
        jnp.where(due.reached & live, write_slot, 0), due.position,
    )  # fmt: skip
    y, states, *new_tail = pl.pallas_call(
        functools.partial(_kernel, block=block, few=min(entries, tail.x.shape[1]), repeats=heads // b.shape[2]),
        grid=(rows, heads, head_dim // block),
        out_shape=[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in (x, states, *tail)],
        input_output_aliases={13 + i: 1 + i for i in range(4)},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="state_replay",
    )(*(v.astype(jnp.int32) for v in scalars), x, dt.astype(F32), a.astype(F32), b, c, d.astype(F32), states, *tail)
    return y, states, type(tail)(*new_tail)


def _kernel(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, x, dt, a, b, c, d, state_in, tail_x, tail_b,
    tail_dt, y, state_out, new_x, new_b, new_dt, *, block: int, few: int, repeats: int,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    group = lax.div(head, repeats)
    steps, entries, size = x.shape[1], tail_x.shape[1], state_in.shape[3]
    here = pl.ds(part * block, block)
    inner, keys = pl.ds(head * x.shape[3] + part * block, block), pl.ds(group * size, size)
    source, ring_of, first, start, count, target, due = (
        plt.load(v.at[row]) for v in (anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    )

    def load_anchor():
        return load_if(source > 0, state_in.at[source, head, here, :], block, size).astype(F32)

    rate, skip = plt.load(a.at[head]), plt.load(d.at[head])
    times = [jnp.int32(t) for t in range(steps)]  # the interpreter does not accept plain integers

    # The new tokens; padding may hold NaN, so it is not loaded.
    values = [load_if(t < count, x.at[row, t, head, here], block).astype(F32) for t in times]
    bs, cs = ([load_if(t < count, v.at[row, t, group, :], size).astype(F32) for t in times] for v in (b, c))
    dts = [jnp.where(t < count, plt.load(dt.at[row, t, head]), 0.0) for t in times]
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
    for t in range(steps):
        for n in range(t + 1):
            between = sum(decays[n + 1 : t + 1], jnp.float32(0))
            out[t] += jnp.sum(cs[t] * bs[n]) * dts[n] * jnp.exp(between) * values[n]
        plt.store(y.at[row, times[t], head, here], jnp.where(t < count, out[t], 0.0).astype(y.dtype))

    for t in range(steps):
        entry = (start + t) & (entries - 1)
        store_if(t < count, new_x.at[ring_of, entry, inner], values[t].astype(new_x.dtype))
        one = (t < count) & (part == 0)
        plt.store(new_dt.at[ring_of, entry, head], dts[t], mask=one)
        store_if(one & (lax.rem(head, repeats) == 0), new_b.at[ring_of, entry, keys], bs[t].astype(new_b.dtype))

    @pl.when(target > 0)
    def _():
        def absorb(state, step, token_x, token_b):
            return state * jnp.exp(step * rate) + (step * token_x)[:, None] * token_b[None, :]

        def replayed(n, state):
            entry = n & (entries - 1)
            of_token = plt.load(tail_x.at[ring_of, entry, inner]), plt.load(tail_b.at[ring_of, entry, keys])
            return absorb(state, plt.load(tail_dt.at[ring_of, entry, head]), *(v.astype(F32) for v in of_token))

        written = lax.fori_loop(first, start, replayed, load_anchor())  # loaded again, to free its registers in between
        for t in range(steps):
            before = start + t < due
            step = jnp.where(before, dts[t], 0.0)
            written = absorb(written, step, values[t], bs[t])
        plt.store(state_out.at[target, head, here, :], written.astype(state_out.dtype))
