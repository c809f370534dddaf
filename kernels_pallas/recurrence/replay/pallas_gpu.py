"""The replay as one Triton kernel: each program takes some channels of one head of one row.

A program reads the anchor and the tail's tokens once for the queries of all new tokens, and for their keys if the
recurrence erases. It reads the tail in blocks of `ENTRIES` tokens, and only valid entries. Log decays are summed from
each token to the present, never subtracted. With decays by channel it reads the tail token by token, the newest first,
because the sums of the decays after each are then running sums. What a new token adds to some channels of a head
depends on no other channel, so each program computes it for its own, one token after the other. Once per interval, a
program computes the state that is due by the recurrence, token after token.

The heads of a group run in parallel, and share one key in the tail: they take keys of new tokens from the inputs, and
one program writes them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas import triton_blocks as triton
from kernels_pallas.recurrence.update import pallas_gpu as update
from kernels_pallas.tails import row_numbers
from kernels_pallas.triton_decode import F32, AnchoredRow, indices

ENTRIES = {True: 16, False: 32}
"""Of a tail in one block, with and without erasing."""


def unsupported(entry, store, tail, places, *, erase, skip):
    return triton.unsupported(entry.key.shape[3], store, tail)


def replay(entry, store, tail, places, *, erase, skip, interpret=False):
    value, decays = entry.value, entry.log_decay.astype(F32)
    rows, _, heads, head_dim = value.shape
    block = triton.power_of_two_in(head_dim, triton.CHANNELS)
    return triton.update_call(
        functools.partial(_kernel, block=block, repeats=entry.repeats, erase=erase),
        "recurrence_replay",
        (rows, heads, head_dim // block),
        (row_numbers(places), entry._replace(log_decay=decays, strength=entry.strength.astype(F32)), skip),
        jax.ShapeDtypeStruct(value.shape, value.dtype),
        (store, tail),
        interpret=interpret,
    )


def _kernel(
    numbers, entry, skip, state_in, tail, y, state_out, new_tail, *, block: int, repeats: int, erase: bool
):  # fmt: skip
    row, head, part = (pl.program_id(axis) for axis in range(3))
    place, here = AnchoredRow(row, *numbers), pl.ds(part * block, block)
    tokens = [update.load_token(place.live(t), t, here, entry, repeats) for t in indices(y.shape[1])]

    def write_y(t, out):
        plt.store(y.at[row, t, head, here], jnp.where(place.live(t), out, 0.0).astype(y.dtype))

    weight = None if skip is None else plt.load(skip.at[head])
    replay_head(place, tokens, weight, state_in, tail, state_out, new_tail, write_y, repeats=repeats, erase=erase)


def replay_head(place, tokens, skip, state_in, tail, state_out, new_tail, write_y, *, repeats, erase):
    """Replays some channels of the program's head, inside a kernel.

    Args:
        place: `AnchoredRow`.
        tokens: by `kernels_pallas.recurrence.update.pallas_gpu.load_token`, of each step; values and keys rounded as
            the tail keeps them.
        skip: of the head; None if there is none.
        write_y: takes a step and its output. It is called early: outputs would otherwise occupy registers to the end.
        repeats: heads that share keys.
    """
    values, qs, ks, strengths, logs = map(list, zip(*tokens, strict=True))
    head, part = pl.program_id(1), pl.program_id(2)
    (tail_u, tail_k, tail_decay, tail_strength), (new_u, new_k, new_decay, new_strength) = tail, new_tail
    steps, block, entries, size = len(values), values[0].shape[0], tail_u.shape[1], state_in.shape[3]
    few = min(ENTRIES[erase], entries)
    here, first, start, ring_of = pl.ds(part * block, block), place.first, place.start, place.tail
    inner, cut = pl.ds(head * state_in.shape[2] + part * block, block), triton.pieces(size)
    keys: list[Any] = [pl.ds(lax.div(head, repeats) * size + piece.start, piece.size) for piece in cut]
    by_channel = tail_decay.shape[2] != state_in.shape[1]
    in_tail: list[Any] = [pl.ds(head * size + n.start, n.size) for n in cut] if by_channel else [head]
    vectors = (ks, qs) if erase else (qs,)

    def load_u(entry):
        """Loads what one token added."""
        value = plt.load(tail_u.at[ring_of, entry, inner]).astype(F32)
        return value if erase else value * plt.load(tail_strength.at[ring_of, entry, head])

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

    state = update.load_state(place, state_in, head, here)
    if by_channel:
        asked = [[triton.decayed(one[t], since[t]) for t in range(steps)] for one in vectors]

        def read_token(i, carry):
            later, found = carry
            entry = (start - 1 - i) & (entries - 1)
            token_u = load_u(entry)
            token_k = triton.decayed([plt.load(tail_k.at[ring_of, entry, n]).astype(F32) for n in keys], later)
            log = [plt.load(tail_decay.at[ring_of, entry, n]) for n in in_tail]
            found = [
                [one + triton.product_with(vector, token_k) * token_u for one, vector in zip(*of, strict=True)]
                for of in zip(found, asked, strict=True)
            ]
            return [a + b for a, b in zip(later, log, strict=True)], found

        nothing = [[jnp.zeros(block, F32) for _ in range(steps)] for _ in asked]
        whole, found = lax.fori_loop(0, start - first, read_token, ([jnp.zeros(n.size, F32) for n in cut], nothing))
        found = [
            [one + triton.product_with(state, triton.decayed(vector, whole)) for one, vector in zip(*of, strict=True)]
            for of in zip(found, asked, strict=True)
        ]
    else:
        everywhere = position(0, entries)
        old_logs = triton.load_if(everywhere < start, tail_decay.at[ring_of, pl.ds(0, entries), head], entries)
        whole = jnp.sum(old_logs)
        # What each new token finds by its query, and by its key if it erases.
        found = [
            [jnp.exp(whole + since[t][0]) * triton.product_with(state, asked[t]) for t in range(steps)]
            for asked in vectors
        ]

        def read_tail(number, found):
            span = pl.ds(number * few, few)
            at = position(number * few, few)
            valid = at < start
            old_u = triton.load_if(valid[:, None], tail_u.at[ring_of, span, inner], few, block).astype(F32)
            old_k = [triton.load_if(valid[:, None], tail_k.at[ring_of, span, n], few, n.size).astype(F32) for n in keys]
            if not erase:
                old_strength = triton.load_if(valid, tail_strength.at[ring_of, span, head], few)
                old_u *= old_strength[:, None]
            later = jnp.sum(jnp.where(everywhere[None, :] > at[:, None], old_logs[None, :], 0.0), axis=1)

            def add(of_token, asked, t):
                weights = jnp.where(valid, triton.product_with(old_k, asked[t]) * jnp.exp(later + since[t][0]), 0.0)
                return of_token + jnp.sum(weights[:, None] * old_u, axis=0)

            return [[add(one, asked, t) for t, one in enumerate(of)] for of, asked in zip(found, vectors, strict=True)]

        # A loop, not one block after the other: their operands would be in registers at the same time.
        found = lax.fori_loop(0, entries // few, read_tail, found)

    u: list[jax.Array] = []
    for t, step in enumerate(indices(steps)):
        of_q = found[-1][t]

        def score(asked, n, t=t):
            return triton.product_with(asked[t], triton.decayed(ks[n], total(n + 1, t)))

        if erase:
            of_k = sum((score(ks, n) * u[n] for n in range(t)), start=found[0][t])
            # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
            u.append((strengths[t] * (values[t] - of_k)).astype(new_u.dtype).astype(F32))
        else:
            u.append(strengths[t] * values[t])
        for n in range(t + 1):
            of_q += score(qs, n) * u[n]
        write_y(step, of_q if skip is None else of_q + skip * values[t])

    for t, step in enumerate(indices(steps)):
        entry, live = place.entry(tail_u, step), place.live(step)
        triton.store_if(live, new_u.at[ring_of, entry, inner], (u if erase else values)[t].astype(new_u.dtype))
        one = live & (part == 0)
        for at, log in zip(in_tail, logs[t], strict=True):
            triton.store_if(one, new_decay.at[ring_of, entry, at], log)
        if new_strength is not None:
            plt.store(new_strength.at[ring_of, entry, head], strengths[t], mask=one)
        for at, key in zip(keys, ks[t], strict=True):
            triton.store_if(one & (lax.rem(head, repeats) == 0), new_k.at[ring_of, entry, at], key.astype(new_k.dtype))

    @pl.when(place.due_slot > 0)
    def _():
        def absorb(state, log_decay, token_u, token_k):
            old = triton.decayed(state, log_decay)
            return [piece + token_u[:, None] * key[None, :] for piece, key in zip(old, token_k, strict=True)]

        def replayed(n, state):
            entry = n & (entries - 1)
            token_k = [plt.load(tail_k.at[ring_of, entry, n]).astype(F32) for n in keys]
            return absorb(state, [plt.load(tail_decay.at[ring_of, entry, n]) for n in in_tail], load_u(entry), token_k)

        # Loaded again, to free its registers in between.
        written = lax.fori_loop(first, start, replayed, update.load_state(place, state_in, head, here))
        for t in range(steps):
            before = start + t < place.due
            kept = [jnp.where(before, log, 0.0) for log in logs[t]]
            written = absorb(written, kept, jnp.where(before, u[t], 0.0), ks[t])
        for at, piece in zip(cut, written, strict=True):
            plt.store(state_out.at[place.due_slot, head, here, at], piece.astype(state_out.dtype))
