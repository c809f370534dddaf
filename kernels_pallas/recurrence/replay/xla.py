"""The replay in plain JAX: an update from the state that each row's anchor and tail give (`row_loop.replay`)."""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas import tails
from kernels_pallas.recurrence.entry import Entry, Tail
from kernels_pallas.recurrence.update.xla import add_token, numbers_of
from kernels_pallas.row_loop import read_heads, replay_by_platform
from kernels_pallas.row_loop import replay as replay_rows

F32 = jnp.float32


def _replay(loop, entry, states, tail, places, skip, *, erase):
    (_, steps, heads, _), groups, dtype = entry.value.shape, entry.key.shape[2], entry.value.dtype
    real = jnp.arange(steps) < places.num_tokens[:, None]
    entry = entry._replace(strength=jnp.where(real[..., None], entry.strength, 0)).masked()
    # Rounded as they are kept, so that a token counts alike in its own step and in later ones.
    entry = entry._replace(key=entry.key.astype(tail.key.dtype))
    entry = entry if erase else entry._replace(value=entry.value.astype(tail.value.dtype))
    wide = Entry(*(v.astype(F32) for v in entry))
    # If the recurrence erases, what a token adds is known after its step.
    first = ("key", "log_decay") if erase else Tail._fields
    rings, new = ([getattr(v, name) for name in first] for v in (tail, entry))
    tail = tail._replace(**dict(zip(first, tails.append(rings, new, places), strict=True)))

    def absorb(state, value, key, log_decay, strength=None):
        strength = jnp.ones(heads) if strength is None else strength
        numbers = key.reshape(groups, -1), value.reshape(heads, -1), jnp.exp(log_decay).reshape(heads, -1), strength
        # Held apart from what is computed of the state: XLA:CPU would repeat it, exponentials too, for each number.
        return add_token(state, *lax.optimization_barrier(numbers), erase=False)[0]

    def run(state, query, *numbers):
        state, added = add_token(state, *numbers, erase=erase, kept=tail.value.dtype if erase else F32)
        return state, (read_heads(state, query), added)

    rings = [ring for ring in tail if ring is not None]
    (y, added), states = replay_rows(loop, run, numbers_of(wide), absorb, rings, states, places)
    if erase:
        tail = tail._replace(value=tails.append([tail.value], [added.astype(tail.value.dtype)], places)[0])
    y = y if skip is None else y + skip.astype(F32)[:, None] * wide.value
    return y.astype(dtype), states, tail


def replay(entry, store, tail, places, *, erase, skip):
    if not entry.value.size:
        return entry.value, store, tail
    return replay_by_platform(functools.partial(_replay, erase=erase), entry, store, tail, places, skip)
