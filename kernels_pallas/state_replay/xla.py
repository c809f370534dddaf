"""The replay in plain JAX, in the form of a chunk: everything since the anchor at once, so that it is read once.

With s the running sum of dt * a since the anchor, token t's output is

    y[t] = exp(s[t]) C[t] S(a) + sum over n <= t of exp(s[t] - s[n]) dt[n] (C[t] B[n]) x[n] + d x[t]

(Dao and Gu, 2024, section 6). On CPU, the anchors of a few rows at a time are read in place; on other platforms, the
anchors of all rows are gathered.
"""

import functools
import math

import jax.numpy as jnp
from jax import lax

from kernels_pallas import tails
from kernels_pallas.row_loop import by_platform
from kernels_pallas.slots import load, read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

_ROWS_AT_ONCE = 4  # whose states are in the processor's cache together, as in `kernels_pallas.row_loop`


def _replay(
    anchors, states, tail, x, dt, a, b, c, d, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot,
    interval,
):  # fmt: skip
    dtype = x.dtype
    steps = x.shape[1]
    order = tails.Order.of(anchor_length, length, num_tokens, entries=tail[0].shape[1], steps=steps)
    tail = type(tail)(*tails.append(tail, (x, b, dt), order, tail_id))
    fed_x, fed_b, fed_dt = (
        tails.in_order(v, order, tail_id, *new.shape[2:]) for v, new in zip(tail, (x, b, dt), strict=True)
    )
    real = order.is_new[:, :, None, None]
    # Values of padding are masked, because 0 * NaN is NaN.
    x, c = (jnp.where(real, v, 0).astype(F32) for v in (x, c))
    a, d = a.astype(F32), d.astype(F32)

    sums = jnp.cumsum(fed_dt * a, axis=1)  # the log of the decay since the anchor, [rows, entries, heads]
    now = tails.at(sums, order.index_of_new)
    # Masked before exp: for later tokens exp could overflow.
    later = jnp.where(order.seen, 0, -jnp.inf)[..., None]
    weights = jnp.exp(now[:, :, None] - sums[:, None] + later) * fed_dt[:, None]  # [rows, steps, entries, heads]
    due = tails.next_boundary(length, num_tokens, interval)
    at_boundary = tails.at(sums, (due.position - anchor_length - 1)[:, None])[:, 0]
    taken = jnp.where((order.position < due.position[:, None])[..., None], at_boundary[:, None] - sums, -jnp.inf)
    fed = fed_x * (jnp.exp(taken) * fed_dt)[..., None]
    write = jnp.where(due.reached, write_slot, 0)
    before, states = anchors(
        states, c, jnp.exp(at_boundary), fed, fed_b, anchor_slot, write, precision=_precision(dtype)
    )
    y = _inside(c, fed_b, weights, fed_x, _precision(dtype)) + before * jnp.exp(now)[..., None] + x * d[:, None]
    return jnp.where(real, y, 0).astype(dtype), states, tail


def _inside(c, b, weights, x, precision):
    """Returns the contribution of the tokens since the anchor: [rows, steps, heads, head_dim]."""
    dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=precision)
    scores = dot("rtgs,rngs->rtng", c, b)
    weights = weights.reshape(*scores.shape, -1) * scores[..., None]
    return dot("rtnh,rnhp->rthp", weights.reshape(*scores.shape[:3], -1), x)


def _gathered(states, c, decay, fed, b, anchor_slot, write, *, precision):
    """Returns each row's products with its anchor, [rows, steps, heads, head_dim], and the states with those due.

    decay [rows, heads] and fed [rows, entries, heads, head_dim] transform the anchor into the state that is due.
    """
    rows, steps, groups, size = c.shape
    heads, head_dim = states.shape[1:3]
    dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=precision)
    anchor = read_slots(states, anchor_slot).astype(F32)
    before = dot("rtgs,rgms->rtgm", c, anchor.reshape(rows, groups, -1, size)).reshape(rows, steps, heads, head_dim)
    added = dot("rngm,rngs->rgms", fed.reshape(*fed.shape[:2], groups, -1), b).reshape(anchor.shape)
    return before, write_slots(states, anchor * decay[..., None, None] + added, write)


def _by_row_blocks(states, c, decay, fed, b, anchor_slot, write, *, precision):
    """As `_gathered`, without a copy of a state."""
    rows, steps = c.shape[:2]
    heads, head_dim = states.shape[1:3]
    few = math.gcd(rows, _ROWS_AT_ONCE)
    zero = jnp.zeros((), states.dtype)

    def body(i, carry):
        before, states, due = carry

        def here(v):
            return lax.dynamic_slice_in_dim(v, i * few, few)

        slots, writes, queries = here(anchor_slot), here(write), here(c)

        def read(states, due):
            there = (slots > 0).reshape(few, 1, 1, 1)
            anchor = jnp.where(there, take(states, slots), zero).astype(F32)
            out = jnp.stack([tails.read(anchor, queries[:, t]) for t in range(steps)], axis=1)

            def compute(k):
                anchor = jnp.where(slots[k] > 0, load(states, slots[k]), zero).astype(F32)
                return tails.state_after(anchor, here(decay)[k], here(fed)[k], here(b)[k]).astype(states.dtype)

            return out, [
                lax.cond(writes[k] > 0, functools.partial(compute, k), lambda old=old: old) for k, old in enumerate(due)
            ]

        def nothing(states, due):
            return jnp.zeros((few, steps, heads, head_dim), F32), due

        # All reads in one conditional, which the writes depend on: else XLA:CPU would repeat reads after them, and copy
        # the store first (see `kernels_pallas.slots.read_slots`).
        out, due = lax.cond(((slots > 0) | (writes > 0)).any(), read, nothing, states, due)
        for k in range(few):
            states = write_slot_if(states, due[k], writes[k])
        return lax.dynamic_update_slice_in_dim(before, out, i * few, 0), states, due

    # The loop carries the states that are due, so that no zeros are allocated for rows without one.
    none = [jnp.zeros(states.shape[1:], states.dtype)] * few
    carry = jnp.zeros((rows, steps, heads, head_dim), F32), states, none
    before, states, _ = lax.fori_loop(0, rows // few, body, carry)
    return before, states


def _precision(dtype):
    """In lower precisions than float32 the products may round as the model's own do."""
    return lax.Precision.HIGHEST if dtype == F32 else lax.Precision.DEFAULT


all_rows, row_blocks = (functools.partial(_replay, anchors) for anchors in (_gathered, _by_row_blocks))
state_replay = by_platform(cpu=row_blocks, default=all_rows)
"""See `api.state_replay`."""
