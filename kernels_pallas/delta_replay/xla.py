"""The delta rule's replay in plain JAX: the anchors are read once, for the new tokens' k and q together.

Their products with all earlier tokens are one sum, decayed by `by_head` or `by_channel`; the new tokens' u are computed
one after another. On CPU, the anchors of a few rows at a time are read in place, and a state is computed only if it is
due. On other platforms, the anchors of all rows are gathered.
"""

import functools
import math

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import tails
from kernels_pallas.delta_replay.by_channel import ByChannel
from kernels_pallas.delta_replay.by_head import ByHead
from kernels_pallas.row_loop import by_platform
from kernels_pallas.slots import load, read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

_ROWS_AT_ONCE = 4  # whose states are in the processor's cache together, as in `kernels_pallas.row_loop`


def _replay(
    read, write, states, tail, q, k, v, log_decay, beta, *, anchor_slot, tail_id, anchor_length, length, num_tokens,
    write_slot, interval,
):  # fmt: skip
    steps, dtype = v.shape[1], v.dtype
    order = tails.Order.of(anchor_length, length, num_tokens, entries=tail.u.shape[1], steps=steps)
    new_k, new_decay = tails.append(tail[1:], (k, log_decay), order, tail_id)
    keys = tails.in_order(new_k, order, tail_id, *k.shape[2:])
    form = ByHead if log_decay.ndim == 3 else ByChannel
    decays = form.of(tails.in_order(new_decay, order, tail_id, *log_decay.shape[2:]), log_decay, order)
    real = order.is_new[:, :, None, None]
    # Values of padding are masked, because 0 * NaN is NaN.
    q, k, v = (jnp.where(real, one, 0).astype(F32) for one in (q, k, v))
    beta = jnp.where(order.is_new[..., None], beta, 0).astype(F32)

    # Products of k and q with the anchor and the tail's tokens: [rows, 2 * steps, heads, head_dim].
    asked = jnp.concatenate([k, q], axis=1)
    old_u = jnp.where(order.is_old[..., None, None], tails.in_order(tail.u, order, tail_id, *v.shape[2:]), 0)
    found = decays.of_old(functools.partial(read, states, anchor_slot), asked, keys, old_u)

    u: list[Array] = []
    y: list[Array] = []
    scores = decays.of_new(asked, k)
    for t in range(steps):
        of_k, of_q = found[:, t], found[:, steps + t]
        for n in range(t):
            of_k += scores[:, t, n, :, None] * u[n]
        added = beta[:, t, :, None] * (v[:, t] - of_k)
        # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
        u.append(added.astype(tail.u.dtype).astype(F32))
        for n in range(t + 1):
            of_q += scores[:, steps + t, n, :, None] * u[n]
        y.append(of_q)

    (new_u,) = tails.append(tail[:1], (jnp.stack(u, axis=1).astype(tail.u.dtype),), order, tail_id)
    due = tails.next_boundary(length, num_tokens, interval)
    left, keys, fed = decays.until(due.position, keys, tails.in_order(new_u, order, tail_id, *v.shape[2:]))
    target = jnp.where(due.reached & (num_tokens > 0), write_slot, 0)
    states = write(states, left, fed, keys, anchor_slot, target)
    return jnp.where(real, jnp.stack(y, axis=1), 0).astype(dtype), states, type(tail)(new_u, new_k, new_decay)


def _read_gathered(states, anchor_slot, asked):
    (rows, count, groups, size), (heads, head_dim) = asked.shape, states.shape[1:3]
    anchor = read_slots(states, anchor_slot).astype(F32).reshape(rows, groups, -1, size)
    found = jnp.einsum("rtgs,rgms->rtgm", asked, anchor, precision=lax.Precision.HIGHEST)
    return found.reshape(rows, count, heads, head_dim)


def _write_gathered(states, decay, fed, keys, anchor_slot, target):
    anchor = read_slots(states, anchor_slot).astype(F32)
    by_group = fed.reshape(*fed.shape[:2], keys.shape[2], -1)
    added = jnp.einsum("rngm,rngs->rgms", by_group, keys, precision=lax.Precision.HIGHEST).reshape(anchor.shape)
    return write_slots(states, anchor * decay.reshape(*anchor.shape[:2], 1, -1) + added, target)


def _read_by_blocks(states, anchor_slot, asked):
    (rows, count), (heads, head_dim) = asked.shape[:2], states.shape[1:3]
    few = math.gcd(rows, _ROWS_AT_ONCE)

    def body(i, found):
        def here(v):
            return lax.dynamic_slice_in_dim(v, i * few, few)

        slots, queries = here(anchor_slot), here(asked)

        def read(states):
            there = (slots > 0).reshape(few, 1, 1, 1)
            anchor = jnp.where(there, take(states, slots), jnp.zeros((), states.dtype)).astype(F32)
            return jnp.stack([tails.read(anchor, queries[:, t]) for t in range(count)], axis=1)

        def nothing(states):
            return jnp.zeros((few, count, heads, head_dim), F32)

        # A conditional, for the reason that `kernels_pallas.row_loop` has one.
        return lax.dynamic_update_slice_in_dim(found, lax.cond((slots > 0).any(), read, nothing, states), i * few, 0)

    return lax.fori_loop(0, rows // few, body, jnp.zeros((rows, count, heads, head_dim), F32))


def _write_due(states, decay, fed, keys, anchor_slot, target):
    def body(row, carry):
        def compute(states, _):
            slot = anchor_slot[row]
            anchor = jnp.where(slot > 0, load(states, slot), jnp.zeros((), states.dtype)).astype(F32)
            return tails.state_after(anchor, decay[row], fed[row], keys[row]).astype(states.dtype)

        states, due = carry
        # Handed on from row to row, so that where none is due, not even zeros are made.
        due = lax.cond(target[row] > 0, compute, lambda _, due: due, states, due)
        return write_slot_if(states, due, target[row]), due

    return lax.fori_loop(0, len(target), body, (states, jnp.zeros(states.shape[1:], states.dtype)))[0]


all_rows = functools.partial(_replay, _read_gathered, _write_gathered)
row_blocks = functools.partial(_replay, _read_by_blocks, _write_due)
delta_replay = by_platform(cpu=row_blocks, default=all_rows)
"""See `api.delta_replay`."""
