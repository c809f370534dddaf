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

from kernels_pallas.tails import row_numbers
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
)  # fmt: skip
from kernels_pallas.triton_decode import AnchoredRow, indices

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
    states, tail, q, k, v, log_decay, beta, *, interpret=False, channels=32, entries=16, warps=4, **places,
):  # fmt: skip
    """See `api.delta_replay`. `channels` (at most, of a head) go into one program of `warps` warps, and `entries` (at
    most) of a tail into one block.
    """
    rows, _, heads, head_dim = v.shape
    block = power_of_two_in(head_dim, channels)
    y, states, *new_tail = update_call(
        functools.partial(_kernel, block=block, few=min(entries, tail.u.shape[1]), repeats=heads // k.shape[2]),
        "delta_replay",
        (rows, heads, head_dim // block),
        (*row_numbers(**places), q, k, v, log_decay.astype(F32), beta.astype(F32)),
        jax.ShapeDtypeStruct(v.shape, v.dtype),
        (states, *tail),
        interpret=interpret,
        warps=warps,
    )
    return y, states, type(tail)(*new_tail)


def _kernel(
    anchor, tail_id, anchor_length, length, num_tokens, write, boundary, q, k, v, log_decay, beta, state_in, tail_u,
    tail_k, tail_decay, y, state_out, new_u, new_k, new_decay, *, block: int, few: int, repeats: int,
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place = AnchoredRow(row, anchor, tail_id, anchor_length, length, num_tokens, write, boundary)
    group, times, cut = lax.div(head, repeats), list(indices(v.shape[1])), pieces(state_in.shape[3])
    here = pl.ds(part * block, block)
    # The new tokens; padding may hold NaN, so it is not loaded.
    values = [load_if(place.live(t), v.at[row, t, head, here], block).astype(F32) for t in times]
    ks, qs = (
        [[load_if(place.live(t), one.at[row, t, group, n], n.size).astype(F32) for n in cut] for t in times]
        for one in (k, q)
    )
    shares = [jnp.where(place.live(t), plt.load(beta.at[row, t, head]), 0.0) for t in times]
    # Of the head, or of each channel of its keys, in pieces.
    of_token = [[head, n] for n in cut] if len(log_decay.shape) == 4 else [[head]]
    logs = [[jnp.where(place.live(t), plt.load(log_decay.at[row, t, *at]), 0.0) for at in of_token] for t in times]

    def write_y(t, value):
        plt.store(y.at[row, t, head, here], jnp.where(place.live(t), value, 0.0).astype(y.dtype))

    replay(
        place, values, ks, qs, shares, logs, state_in, (tail_u, tail_k, tail_decay), state_out,
        (new_u, new_k, new_decay), write_y, few=few, repeats=repeats,
    )  # fmt: skip


def replay(place, values, ks, qs, shares, logs, state_in, tail, state_out, new_tail, write_y, *, few, repeats):
    """Replays some channels of the program's head, inside a kernel.

    Args:
        place: `AnchoredRow`.
        values, ks, qs, shares, logs: of the new tokens, float32; zeros for padding, and keys rounded as the tail keeps
            them. Keys and queries are in pieces. Logs of decays are one number of the head, or pieces.
        write_y: as of `kernels_pallas.state_replay.pallas_gpu.replay`.
        few: so many entries of the tail are in one block.
        repeats: heads that share keys.
    """
    head, part = pl.program_id(1), pl.program_id(2)
    (tail_u, tail_k, tail_decay), (new_u, new_k, new_decay) = tail, new_tail
    steps, block, entries, size = len(values), values[0].shape[0], tail_u.shape[1], state_in.shape[3]
    here, first, start, ring_of = pl.ds(part * block, block), place.first, place.start, place.tail
    inner, cut = pl.ds(head * state_in.shape[2] + part * block, block), pieces(size)
    keys: list[Any] = [pl.ds(lax.div(head, repeats) * size + piece.start, piece.size) for piece in cut]
    by_channel = tail_decay.shape[2] != state_in.shape[1]
    in_tail: list[Any] = [pl.ds(head * size + n.start, n.size) for n in cut] if by_channel else [head]

    def load_anchor():
        return [
            load_if(place.source > 0, state_in.at[place.source, head, here, n], block, n.size).astype(F32) for n in cut
        ]

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
        asked = [[decayed(one[t], since[t]) for t in range(steps)] for one in (ks, qs)]

        def read_token(i, carry):
            later, found = carry
            entry = (start - 1 - i) & (entries - 1)
            token_u = plt.load(tail_u.at[ring_of, entry, inner]).astype(F32)
            token_k = decayed([plt.load(tail_k.at[ring_of, entry, n]).astype(F32) for n in keys], later)
            log = [plt.load(tail_decay.at[ring_of, entry, n]) for n in in_tail]
            found = [
                [one + product_with(vector, token_k) * token_u for one, vector in zip(of, vectors, strict=True)]
                for of, vectors in zip(found, asked, strict=True)
            ]
            return [a + b for a, b in zip(later, log, strict=True)], found

        nothing = [[jnp.zeros(block, F32) for _ in range(steps)] for _ in asked]
        whole, found = lax.fori_loop(0, start - first, read_token, ([jnp.zeros(n.size, F32) for n in cut], nothing))
        found = [
            [one + product_with(state, decayed(vector, whole)) for one, vector in zip(of, vectors, strict=True)]
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
    for t, step in enumerate(indices(steps)):
        of_k, of_q = found[0][t], found[1][t]

        def score(asked, n, t=t):
            return product_with(asked[t], decayed(ks[n], total(n + 1, t)))

        for n in range(t):
            of_k += score(ks, n) * u[n]
        # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
        u.append((shares[t] * (values[t] - of_k)).astype(new_u.dtype).astype(F32))
        for n in range(t + 1):
            of_q += score(qs, n) * u[n]
        write_y(step, of_q)

    for t, step in enumerate(indices(steps)):
        entry, live = place.entry(tail_u, step), place.live(step)
        store_if(live, new_u.at[ring_of, entry, inner], u[t].astype(new_u.dtype))
        one = live & (part == 0)
        for at, log in zip(in_tail, logs[t], strict=True):
            store_if(one, new_decay.at[ring_of, entry, at], log)
        for at, key in zip(keys, ks[t], strict=True):
            store_if(one & (lax.rem(head, repeats) == 0), new_k.at[ring_of, entry, at], key.astype(new_k.dtype))

    @pl.when(place.due_slot > 0)
    def _():
        def absorb(state, log_decay, token_u, token_k):
            old = decayed(state, log_decay)
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
            before = start + t < place.due
            kept = [jnp.where(before, log, 0.0) for log in logs[t]]
            written = absorb(written, kept, jnp.where(before, u[t], 0.0), ks[t])
        for at, piece in zip(cut, written, strict=True):
            plt.store(state_out.at[place.due_slot, head, here, at], piece.astype(state_out.dtype))
