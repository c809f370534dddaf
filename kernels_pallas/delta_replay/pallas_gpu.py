"""The delta rule's replay as one Triton kernel: each program takes some channels of one head of one row.

Programs, slots and tails are those of `kernels_pallas.state_replay.pallas_gpu`. A program reads the anchor and the
tail's tokens once for k and q of all new tokens. With decays by channel it reads the tail token by token, the newest
first, because the sums of the decays after each are then running sums. What a new token adds to some channels of a head
depends on no other channel, so each program computes it for its own, one token after the other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import tails
from kernels_pallas.triton_blocks import (
    LEAST_OF_PIECE,
    load_if,
    offsets_overflow,
    pieces,
    power_of_two_in,
    product_with,
    store_if,
)  # fmt: skip

F32 = jnp.float32


def unsupported(states, tail, q, k, v, log_decay, beta, **places):
    """Returns why this call cannot run, or None."""
    if 0 in (*v.shape, *k.shape):
        return "it is empty"
    if offsets_overflow(states) or any(map(offsets_overflow, tail)):
        return "offsets into the store do not fit in 32 bits"
    if k.shape[3] % LEAST_OF_PIECE:
        return f"keys have a size of {k.shape[3]}, not a multiple of {LEAST_OF_PIECE}"
    return None


def delta_replay(
    states, tail, q, k, v, log_decay, beta, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot,
    interval, interpret=False, channels=32, entries=16, warps=4,
):  # fmt: skip
    """See `api.delta_replay`. `channels` (at most, of a head) go into one program of `warps` warps, and `entries` (at
    most) of a tail into one block.
    """
    rows, _, heads, head_dim = v.shape
    block = power_of_two_in(head_dim, channels)
    due = tails.next_boundary(length, num_tokens, interval)
    live = num_tokens > 0
    scalars = (
        jnp.where(live, anchor_slot, 0), tail_id, anchor_length, length, num_tokens,
        jnp.where(due.reached & live, write_slot, 0), due.position,
    )  # fmt: skip
    y, states, *new_tail = pl.pallas_call(
        functools.partial(_kernel, block=block, few=min(entries, tail.u.shape[1]), repeats=heads // k.shape[2]),
        grid=(rows, heads, head_dim // block),
        out_shape=[jax.ShapeDtypeStruct(one.shape, one.dtype) for one in (v, states, *tail)],
        input_output_aliases={12 + i: 1 + i for i in range(4)},
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
        interpret=interpret,
        name="delta_replay",
    )(*(one.astype(jnp.int32) for one in scalars), q, k, v, log_decay.astype(F32), beta.astype(F32), states, *tail)
    return y, states, type(tail)(*new_tail)


def _kernel(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, q, k, v, log_decay, beta, state_in, tail_u,
    tail_k, tail_decay, y, state_out, new_u, new_k, new_decay, *, block: int, few: int, repeats: int,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    group = lax.div(head, repeats)
    steps, entries, size = v.shape[1], tail_u.shape[1], state_in.shape[3]
    here = pl.ds(part * block, block)
    inner, cut = pl.ds(head * v.shape[3] + part * block, block), pieces(size)
    keys: list[Any] = [pl.ds(group * size + piece.start, piece.size) for piece in cut]
    source, ring_of, first, start, count, target, due = (
        plt.load(one.at[row]) for one in (anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    )

    def load_anchor():
        return [load_if(source > 0, state_in.at[source, head, here, n], block, n.size).astype(F32) for n in cut]

    times = [jnp.int32(t) for t in range(steps)]  # the interpreter does not accept plain integers

    # The new tokens; padding may hold NaN, so it is not loaded.
    values = [load_if(t < count, v.at[row, t, head, here], block).astype(F32) for t in times]
    ks, qs = (
        [[load_if(t < count, one.at[row, t, group, n], n.size).astype(F32) for n in cut] for t in times]
        for one in (k, q)
    )
    shares = [jnp.where(t < count, plt.load(beta.at[row, t, head]), 0.0) for t in times]
    # Of the head, or of each channel of its keys, in pieces.
    by_channel = len(log_decay.shape) == 4
    of_token = [[head, n] for n in cut] if by_channel else [[head]]
    in_tail: list[Any] = [pl.ds(head * size + n.start, n.size) for n in cut] if by_channel else [head]
    logs = [[jnp.where(t < count, plt.load(log_decay.at[row, t, *at]), 0.0) for at in of_token] for t in times]

    def total(first, last):
        """Sums log decays over new tokens."""
        return [sum(pieces_of, jnp.float32(0)) for pieces_of in zip(*logs[first : last + 1], strict=True)] or [
            jnp.float32(0)
        ]

    since = [total(0, t) for t in range(steps)]  # from the tail's last token to each

    # The tail's tokens before them.
    def position(span, size):
        entry = lax.broadcasted_iota(jnp.int32, (size,), 0) + span
        return first + ((entry - first) & (entries - 1))

    state = load_anchor()
    if by_channel:
        asked = [[_decayed(one[t], since[t]) for t in range(steps)] for one in (ks, qs)]

        def read_token(i, carry):
            later, found = carry
            entry = (start - 1 - i) & (entries - 1)
            token_u = plt.load(tail_u.at[ring_of, entry, inner]).astype(F32)
            token_k = _decayed([plt.load(tail_k.at[ring_of, entry, n]).astype(F32) for n in keys], later)
            log = [plt.load(tail_decay.at[ring_of, entry, n]) for n in in_tail]
            found = [
                [one + product_with(vector, token_k) * token_u for one, vector in zip(of, vectors, strict=True)]
                for of, vectors in zip(found, asked, strict=True)
            ]
            return [a + b for a, b in zip(later, log, strict=True)], found

        nothing = [[jnp.zeros(block, F32) for _ in range(steps)] for _ in asked]
        whole, found = lax.fori_loop(0, start - first, read_token, ([jnp.zeros(n.size, F32) for n in cut], nothing))
        found = [
            [one + product_with(state, _decayed(vector, whole)) for one, vector in zip(of, vectors, strict=True)]
            for of, vectors in zip(found, asked, strict=True)
        ]
    else:
        everywhere = position(0, entries)
        old_logs = load_if(everywhere < start, tail_decay.at[ring_of, pl.ds(0, entries), head], entries)
        whole = jnp.sum(old_logs)
        # What each new token finds by its k, and by its q.
        found = [
            [jnp.exp(whole + since[t][0]) * product_with(state, asked[t]) for t in range(steps)] for asked in (ks, qs)
        ]

        def read_tail(number, found):
            span = pl.ds(number * few, few)
            at = position(number * few, few)
            valid = at < start
            old_u = load_if(valid[:, None], tail_u.at[ring_of, span, inner], few, block).astype(F32)
            old_k = [load_if(valid[:, None], tail_k.at[ring_of, span, n], few, n.size).astype(F32) for n in keys]
            later = jnp.sum(jnp.where(everywhere[None, :] > at[:, None], old_logs[None, :], 0.0), axis=1)

            def add(of_token, asked, t):
                weights = jnp.where(valid, product_with(old_k, asked[t]) * jnp.exp(later + since[t][0]), 0.0)
                return of_token + jnp.sum(weights[:, None] * old_u, axis=0)

            return [[add(one, asked, t) for t, one in enumerate(of)] for of, asked in zip(found, (ks, qs), strict=True)]

        # A loop, not one block after the other: their operands would be in registers at the same time.
        found = lax.fori_loop(0, entries // few, read_tail, found)

    u: list[jax.Array] = []
    for t in range(steps):
        of_k, of_q = found[0][t], found[1][t]

        def score(asked, n, t=t):
            return product_with(asked[t], _decayed(ks[n], total(n + 1, t)))

        for n in range(t):
            of_k += score(ks, n) * u[n]
        # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
        u.append((shares[t] * (values[t] - of_k)).astype(new_u.dtype).astype(F32))
        for n in range(t + 1):
            of_q += score(qs, n) * u[n]
        plt.store(y.at[row, times[t], head, here], jnp.where(t < count, of_q, 0.0).astype(y.dtype))

    for t in range(steps):
        entry = (start + t) & (entries - 1)
        store_if(t < count, new_u.at[ring_of, entry, inner], u[t].astype(new_u.dtype))
        one = (t < count) & (part == 0)
        for place, log in zip(in_tail, logs[t], strict=True):
            store_if(one, new_decay.at[ring_of, entry, place], log)
        for place, key in zip(keys, ks[t], strict=True):
            store_if(one & (lax.rem(head, repeats) == 0), new_k.at[ring_of, entry, place], key.astype(new_k.dtype))

    @pl.when(target > 0)
    def _():
        def absorb(state, log_decay, token_u, token_k):
            old = _decayed(state, log_decay)
            return [piece + token_u[:, None] * key[None, :] for piece, key in zip(old, token_k, strict=True)]

        def replayed(n, state):
            entry = n & (entries - 1)
            token_u, *token_k = (
                plt.load(one).astype(F32)
                for one in (tail_u.at[ring_of, entry, inner], *(tail_k.at[ring_of, entry, n] for n in keys))
            )
            return absorb(state, [plt.load(tail_decay.at[ring_of, entry, n]) for n in in_tail], token_u, token_k)

        written = lax.fori_loop(first, start, replayed, load_anchor())  # loaded again, to free its registers in between
        for t in range(steps):
            before = start + t < due
            kept = [jnp.where(before, log, 0.0) for log in logs[t]]
            written = absorb(written, kept, jnp.where(before, u[t], 0.0), ks[t])
        for place, piece in zip(cut, written, strict=True):
            plt.store(state_out.at[target, head, here, place], piece.astype(state_out.dtype))


def _decayed(cut, log_decay):
    """Multiplies the last axis, in pieces, with decays: one of each channel, in equal pieces, or one of them all."""
    logs = log_decay if len(log_decay) == len(cut) else log_decay * len(cut)
    decays = [jnp.exp(log) for log in logs]
    return [
        piece * (decay[None, :] if decay.ndim < piece.ndim and decay.ndim else decay)
        for piece, decay in zip(cut, decays, strict=True)
    ]
