"""The replay in plain JAX: the anchors are read once, for the new tokens' queries, and keys if the recurrence erases.

Their products with all earlier tokens are one sum, decayed by `by_head` or `by_channel`; what new tokens add is then
computed one after another. On CPU, the anchors of a few rows at a time are read in place, and a state is computed only
if it is due. On other platforms, the anchors of all rows are gathered.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas import tails
from kernels_pallas.recurrence.entry import Tail
from kernels_pallas.recurrence.replay.decays import ByChannel, ByHead
from kernels_pallas.row_loop import by_platform, read_heads
from kernels_pallas.slots import load, read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

_ROWS_AT_ONCE = 4  # whose states are in the processor's cache together, as in `kernels_pallas.row_loop`


def _replay(read, write, entry, states, tail, places, *, erase, skip):
    steps, dtype, tail_id = entry.value.shape[1], entry.value.dtype, places.tail_id
    if not entry.value.size:
        return entry.value, states, tail
    order = tails.Order.of(places, entries=tail.value.shape[1], steps=steps)
    kept, channels = [tail.key, tail.log_decay], [entry.key, entry.log_decay]
    if not erase:
        kept, channels = [*kept, tail.value, tail.strength], [*channels, entry.value, entry.strength]
    kept = tails.append(kept, channels, order, tail_id)
    keys, logs, *added = (
        tails.in_order(ring, order, tail_id, *v.shape[2:]) for ring, v in zip(kept, channels, strict=True)
    )
    decays = (ByChannel if entry.by_channel else ByHead).of(logs, entry.log_decay, order)
    real = order.is_new[:, :, None, None]
    # Values of padding are masked, because 0 * NaN is NaN.
    query, key, value = (jnp.where(real, v, 0).astype(F32) for v in entry[:3])
    strength = jnp.where(order.is_new[..., None], entry.strength, 0).astype(F32)[..., None]

    # Products of the vectors with the anchor and the tail's tokens: [rows, n * steps, heads, head_dim].
    asked = jnp.concatenate([key, query], axis=1) if erase else query
    of_tail = tails.in_order(tail.value, order, tail_id, *value.shape[2:]) if erase else added[0] * added[1][..., None]
    of_tail = jnp.where(order.is_old[..., None, None], of_tail, 0)
    found = decays.of_old(functools.partial(read, states, places.anchor_slot), asked, keys, of_tail)
    target = places.due_slot if erase else places.due_slot + _zero(found)

    u: list[Array] = []
    y: list[Array] = []
    scores, first = decays.of_new(asked, key), steps if erase else 0
    for t in range(steps):
        if erase:
            error = value[:, t] - sum((scores[:, t, n, :, None] * u[n] for n in range(t)), start=found[:, t])
            # Rounded as it is kept, so that a token counts alike in its own step and in later ones.
            u.append((strength[:, t] * error).astype(tail.value.dtype).astype(F32))
        else:
            u.append(strength[:, t] * value[:, t].astype(tail.value.dtype).astype(F32))
        y.append(sum((scores[:, first + t, n, :, None] * u[n] for n in range(t + 1)), start=found[:, first + t]))

    if erase:
        (new_value,) = tails.append([tail.value], [jnp.stack(u, axis=1).astype(tail.value.dtype)], order, tail_id)
        tail, of_all = Tail(new_value, *kept), tails.in_order(new_value, order, tail_id, *value.shape[2:])
    else:
        tail, of_all = Tail(kept[2], kept[0], kept[1], kept[3]), added[0] * added[1][..., None]
    left, keys, fed = decays.until(places.boundary, keys, of_all)
    states = write(states, left, fed, keys, places.anchor_slot, target)
    out = jnp.stack(y, axis=1)
    out = out if skip is None else out + skip.astype(F32)[:, None] * value
    return jnp.where(real, out, 0).astype(dtype), states, tail


def _zero(found):
    """Returns 0, which XLA cannot know before it has these numbers. Without erasing, nothing else makes the writes of
    states wait for the reads, and XLA:CPU would copy the store in between.
    """
    return jnp.minimum(lax.bitcast_convert_type(found[0, 0, 0, 0], jnp.int32) & 0x7FFFFFFF, 0)


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
            return jnp.stack([jax.vmap(read_heads)(anchor, queries[:, t]) for t in range(count)], axis=1)

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


_FORMS = (_read_by_blocks, _write_due), (_read_gathered, _write_gathered)
replay = by_platform(*(functools.partial(_replay, *form) for form in _FORMS))
