"""A few recurrent steps of many rows in plain JAX, for any recurrence, with states in slots.

A recurrence consists of two functions: `step(state, *inputs)` returns one row's next state in the store's dtype, and
`read(state, *queries)` returns the output. `inputs` and `queries` are arrays [rows, steps, ...]; the functions receive
the part of one row and step. Outputs are float32 and [rows, steps, ...]; the store is [slots, ...]. `before(state,
row)`, if given, returns the state before the first step of the row with this index, from the stored one; its dtype is
then that of the row's states.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from kernels_pallas.places import Rows
from kernels_pallas.slots import read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

# Four states of a usual layer (24 heads x 64 x 128, float32) fit in the cache. 32 rows, ms a layer by rows at once:
# 1: 4.2, 2: 3.6, 4: 3.2, 8: 3.2, 32: 6.5.
_ROWS_AT_ONCE = 4


def all_rows(step, read, inputs, queries, store, rows, *, before=None):
    """Gathers all rows' states, runs the rows in parallel, and scatters the states."""
    if not rows.write_slot.size:
        return _no_outputs(read, queries, store, rows), store
    state, y = read_slots(store, rows.read_slot), []
    if before is not None:
        state = jax.vmap(before)(state, jnp.arange(len(rows.read_slot)))
    for t in range(rows.write_slot.shape[1]):
        state = jax.vmap(step)(state, *(v[:, t] for v in inputs))
        y.append(jax.vmap(read)(state, *(v[:, t] for v in queries)))
        store = write_slots(store, state, rows.write_slot[:, t])
    return jnp.stack(y, axis=1), store


def row_blocks(step, read, inputs, queries, store, rows, *, before=None):
    """Loops over a few rows at a time, from slots to slots, so that their states stay in the processor's cache.

    With a product (`dot`) in the loop, XLA would copy the whole store into another layout.
    """
    count, steps = rows.write_slot.shape
    y = _no_outputs(read, queries, store, rows)
    if not rows.write_slot.size:
        return y, store
    few = math.gcd(count, _ROWS_AT_ONCE)

    def next_states(states, inputs, t):
        return _each(step)(states, *(v[:, t] for v in inputs))

    def body(i, carry):
        store, y = carry

        def here(v):
            return lax.dynamic_slice_in_dim(v, i * few, few)

        slots, own = here(rows.read_slot), [here(v) for v in inputs]
        there = (slots > 0).reshape(-1, *[1] * (store.ndim - 1))

        def first(states):
            if before is not None:
                states = _each(before)(states, i * few + jnp.arange(few))
            return next_states(states, own, 0)

        def start(store):
            return first(jnp.where(there, take(store, slots), jnp.zeros((), store.dtype)))

        def start_from_zeros(store):
            return first(jnp.zeros((few, *store.shape[1:]), store.dtype))

        # A conditional, because XLA:CPU would repeat a select in every use, and copy the store for uses after a write
        # (observed with small states; see `read_slots`).
        state = lax.cond(there.any(), start, start_from_zeros, store)
        out = []
        for t in range(steps):
            state = next_states(state, own, t) if t else state
            out.append(_each(read)(state, *(here(v)[:, t] for v in queries)))
            for row in range(few):
                store = write_slot_if(store, state[row], here(rows.write_slot)[row, t])
        return store, lax.dynamic_update_slice_in_dim(y, jnp.stack(out, axis=1), i * few, 0)

    store, y = lax.fori_loop(0, count // few, body, (store, y))
    return y, store


def _no_outputs(read, queries, store, rows):
    """Returns zeros in the shape of all outputs."""
    arguments = (store.shape[1:], store.dtype), *((v.shape[2:], v.dtype) for v in queries)
    one = jax.eval_shape(read, *(jax.ShapeDtypeStruct(*each) for each in arguments))
    return jnp.zeros((*rows.write_slot.shape, *one.shape), F32)


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
        return form(*(v[0] for v in arguments))[None] if len(arguments[0]) == 1 else jax.vmap(form)(*arguments)

    return call
