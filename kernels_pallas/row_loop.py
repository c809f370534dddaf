"""A few recurrent steps of many rows in plain JAX, for any recurrence, with states in slots.

A recurrence is a function `token(state, *inputs)`: it returns one row's next state, in the dtype of the given one, and
the token's outputs. `inputs` are arrays [rows, steps, ...], of which it receives the part of one row and step; outputs
become [rows, steps, ...]. The store is [slots, ...]. `before(state, row)`, if given, returns the state before the first
step of the row with this index, from the stored one; its dtype is then that of the row's states.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from kernels_pallas.dispatch import differentiable
from kernels_pallas.places import Anchored, Rows
from kernels_pallas.slots import load, read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

# Four states of a usual layer (24 heads x 64 x 128, float32) fit in the cache. 32 rows, ms a layer by rows at once:
# 1: 4.2, 2: 3.6, 4: 3.2, 8: 3.2, 32: 6.5.
_ROWS_AT_ONCE = 4
_ABSORBED_AT_ONCE = 4


def all_rows(token, inputs, store, rows, *, before=None):
    """Gathers all states, runs the rows in parallel, and scatters the states. Returns the outputs and the store."""
    if not rows.write_slot.size:
        return _no_outputs(token, inputs, store, rows), store
    state, out = read_slots(store, rows.read_slot), []
    if before is not None:
        state = jax.vmap(before)(state, jnp.arange(len(rows.read_slot)))
    for t in range(rows.write_slot.shape[1]):
        state, of_step = jax.vmap(token)(state, *(v[:, t] for v in inputs))
        out.append(of_step)
        store = write_slots(store, state, rows.write_slot[:, t])
    return _stacked(out), store


def row_blocks(token, inputs, store, rows, *, before=None):
    """Loops over a few rows at a time, from slots to slots, so that their states stay in the processor's cache.

    With a product (`dot`) in the loop, XLA would copy the whole store into another layout.
    """
    count, steps = rows.write_slot.shape
    outputs = _no_outputs(token, inputs, store, rows)
    if not rows.write_slot.size:
        return outputs, store
    # States that go through a loop first, one at a time: several took twice as long.
    few = math.gcd(count, _ROWS_AT_ONCE if before is None else 1)

    def body(i, carry):
        store, outputs = carry

        def here(v):
            return lax.dynamic_slice_in_dim(v, i * few, few)

        slots, own = here(rows.read_slot), [here(v) for v in inputs]
        there = (slots > 0).reshape(-1, *[1] * (store.ndim - 1))

        def step(states, t):
            return _each(token)(states, *(v[:, t] for v in own))

        def first(states):
            if before is not None:
                states = _each(before)(states, i * few + jnp.arange(few))
            return step(states, 0)

        def start(store):
            return first(jnp.where(there, take(store, slots), jnp.zeros((), store.dtype)))

        def start_from_zeros(store):
            return first(jnp.zeros((few, *store.shape[1:]), store.dtype))

        # A conditional, because XLA:CPU would repeat a select in every use, and copy the store for uses after a write
        # (observed with small states; see `read_slots`).
        state, one = lax.cond(there.any(), start, start_from_zeros, store)
        out = []
        for t in range(steps):
            state, one = step(state, t) if t else (state, one)
            out.append(one)
            for row in range(few):
                store = write_slot_if(store, state[row], here(rows.write_slot)[row, t])

        def put(all_rows, few_rows):
            return lax.dynamic_update_slice_in_dim(all_rows, few_rows, i * few, 0)

        return store, jax.tree.map(put, outputs, _stacked(out))

    store, outputs = lax.fori_loop(0, count // few, body, (store, outputs))
    return outputs, store


def _stacked(steps):
    return jax.tree.map(lambda *one: jnp.stack(one, axis=1), *steps)


def _no_outputs(token, inputs, store, rows):
    """Returns zeros in the shapes of all outputs."""
    arguments = (store.shape[1:], store.dtype), *((v.shape[2:], v.dtype) for v in inputs)
    _, one = jax.eval_shape(token, *(jax.ShapeDtypeStruct(*each) for each in arguments))
    return jax.tree.map(lambda v: jnp.zeros((*rows.write_slot.shape, *v.shape), v.dtype), one)


def replay(loop, token, inputs, absorb, rings, store, places: Anchored):
    """Runs the new tokens of rows from their anchors and tails. Returns the outputs, and the store with the states due.

    Args:
        loop: `all_rows`; `row_blocks`; or None: as `all_rows`, with a derivative.
        absorb: `absorb(state, *kept)` returns a row's state, in float32, after a token of its tail.
        rings: what tails keep of each token, [tails, entries, ...]; absorbed in float32, and as zeros where there is no
            token.
    """
    entries, live = rings[0].shape[1], places.num_tokens > 0
    flat = [v.reshape(-1, *v.shape[2:]) for v in rings]
    absorbed = jnp.where(live, places.length - places.anchor_length, 0)

    def before(state, row):
        def one(n, state):
            entry = places.tail_id[row] * entries + (places.anchor_length[row] + n) % entries
            kept = (jnp.where(n < absorbed[row], load(v, entry), 0).astype(F32) for v in flat)
            return absorb(state, *kept)

        def several(i, state):  # as one pass over the state
            return functools.reduce(
                lambda state, n: one(i * _ABSORBED_AT_ONCE + n, state), range(_ABSORBED_AT_ONCE), state
            )

        # A loop whose end is found at run time has no derivative.
        end = entries if loop is None else absorbed[row] if loop is row_blocks else absorbed.max(initial=0)
        return lax.fori_loop(0, -(-end // _ABSORBED_AT_ONCE), several, state.astype(F32))

    position = places.length[:, None] + 1 + jnp.arange(inputs[0].shape[1])
    write = jnp.where(position == places.boundary[:, None], places.due_slot[:, None], 0)
    return (loop or all_rows)(token, inputs, store, Rows(places.live_anchor, write), before=before)


def replay_by_platform(form: Callable[..., Any], *arrays: Any) -> Any:
    """Calls `form(loop, *arrays)`, which calls `replay`, with the loop of the target platform of compilation."""
    cpu, default, plain = (functools.partial(form, loop) for loop in (row_blocks, all_rows, None))
    return differentiable(functools.partial(lax.platform_dependent, cpu=cpu, default=default), plain)(*arrays)


def sequences_in_slots(length: int, state: Float[Array, "batch *state"]) -> tuple[Float[Array, "slots *state"], Rows]:
    """Returns a store of the states, and sequences as rows that read slots 1, 2, ... and write them at their ends."""
    row = jnp.arange(1, len(state) + 1)
    store = jnp.concatenate([jnp.zeros_like(state, shape=(1, *state.shape[1:])), state])
    return store, Rows(row, jnp.where(jnp.arange(length) == length - 1, row[:, None], 0))


def by_platform(cpu: Callable[..., Any], default: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operation that selects its form by the target platform of compilation.

    Its arguments are arrays and trees of them; keyword arguments may also be numbers.
    """

    def run(*arrays: Any, **options: Any) -> Any:
        static = {name: value for name, value in options.items() if isinstance(value, int)}

        def by(form: Callable[..., Any]) -> Callable[..., Any]:
            return lambda arrays, others: form(*arrays, **others, **static)

        others = {name: value for name, value in options.items() if name not in static}
        return lax.platform_dependent(arrays, others, cpu=by(cpu), default=by(default))

    return run


def read_heads(
    state: Shaped[Array, "heads head_dim state"], query: Float[Array, "groups state"]
) -> Float[Array, "heads head_dim"]:
    """Multiplies one row's state, converted to float32, and the query of each group of heads, without `dot`."""
    split, shared = head_axes(state.shape[0], query.shape[0])
    grouped = state.astype(F32).reshape(*split, *state.shape[1:])
    return (grouped * query.reshape(*shared, 1, -1)).sum(-1).reshape(state.shape[:2])


def head_axes(heads: int, groups: int) -> tuple[list[int], list[int]]:
    """Axes (groups, repeats) of the heads, and what is shared by a group's heads has in their place.

    Without axes of size 1, with which XLA:CPU's reduction takes eight times as long.
    """
    both = [(groups, groups), (heads // groups, 1)]
    split = [size for size, _ in both if size > 1] or [1]
    return split, [shared for size, shared in both if size > 1] or [1]


def _each(form):
    """`form` for several rows; one row goes without an axis of size 1 (see `head_axes`)."""

    def call(*arguments):
        if len(arguments[0]) > 1:
            return jax.vmap(form)(*arguments)
        return jax.tree.map(lambda v: v[None], form(*(v[0] for v in arguments)))

    return call
