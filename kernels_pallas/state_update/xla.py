"""The state update in plain JAX: a few rows at a time, in place, on CPU; all rows at once elsewhere."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import read_slots, take, write_slot_if, write_slots

F32 = jnp.float32

# Four states of a usual layer (24 heads x 64 x 128, float32) fit in the cache. 32 rows, ms a layer by rows at once:
# 1: 4.2, 2: 3.6, 4: 3.2, 8: 3.2, 32: 6.5.
_ROWS_AT_ONCE = 4


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.state_update`. The form is chosen by the platform compiled for, which may not be the one at hand."""
    arguments = x, dt, a, b, c, d, store, read_slot, write_slot
    return lax.platform_dependent(*arguments, cpu=_positional(few_by_few), default=_positional(all_rows))


def _positional(form):
    def call(*arguments):
        return form(*arguments[:-2], read_slot=arguments[-2], write_slot=arguments[-1])

    return call


def all_rows(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Gathers all rows' states, runs the rows side by side, and scatters."""
    decay, fed, b, c, skip = _prepare(x, dt, a, b, c, d)
    state, y = read_slots(store, read_slot), []
    for t in range(x.shape[1]):
        state = jax.vmap(_step)(state, decay[:, t], fed[:, t], b[:, t])
        y.append(jax.vmap(_read)(state, c[:, t]))
        store = write_slots(store, state, write_slot[:, t])
    return (jnp.stack(y, axis=1) + skip).astype(x.dtype), store


def few_by_few(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """A loop over a few rows at a time, from slots to slots while their states are in the processor's cache.

    A product (`dot`) in the loop would make XLA lay out, and copy, the whole store differently.
    """
    rows, steps = x.shape[:2]
    few = math.gcd(rows, _ROWS_AT_ONCE)
    decay, fed, b, c, skip = _prepare(x, dt, a, b, c, d)

    def update(source, index):
        """The loop's body, reading the states at source(store)[index]; zeros where a row reads slot 0."""

        def body(i, carry):
            store, y = carry

            def here(v):
                return lax.dynamic_slice_in_dim(v, i * few, few)

            first, later = here(index), (here(decay), here(fed), here(b))
            there = (here(read_slot) > 0)[:, None, None, None]

            def start(states):
                return _steps(jnp.where(there, take(states, first), jnp.zeros((), store.dtype)), later, 0)

            def start_from_zeros(states):
                return _steps(jnp.zeros((few, *store.shape[1:]), store.dtype), later, 0)

            # A conditional, because XLA:CPU would repeat a select in every use, and copy the store for those after a
            # write (seen with small states; `read_slots` says more).
            state = lax.cond(there.any(), start, start_from_zeros, source(store))
            out = []
            for t in range(steps):
                state = _steps(state, later, t) if t else state
                out.append(_each(_read)(state, here(c)[:, t]))
                for row in range(few):
                    store = write_slot_if(store, state[row], here(write_slot)[row, t])
            return store, lax.dynamic_update_slice_in_dim(y, jnp.stack(out, axis=1), i * few, 0)

        return body

    def read_first(_, carry):
        copies = take(carry[0], read_slot)
        return lax.fori_loop(0, rows // few, update(lambda _: copies, jnp.arange(rows)), carry)

    # A row that writes what a later row reads needs all reads done first. That is rare, and the copies cost time: it
    # has a loop of its own, of one round or none. (With `cond`, XLA:CPU copies the store.)
    later = jnp.arange(rows)[:, None] < jnp.arange(rows)
    written = (write_slot[:, :, None] == read_slot) & (write_slot[:, :, None] > 0)
    clash = (written.any(axis=1) & later).any().astype(jnp.int32)
    carry = store, jnp.zeros(x.shape, F32)
    carry = lax.fori_loop(0, clash, read_first, carry)
    store, y = lax.fori_loop(0, rows // few * (1 - clash), update(lambda store: store, read_slot), carry)
    return (y + skip).astype(x.dtype), store


def _steps(states, inputs, t):
    """`_step` of several rows: states [rows, heads, head_dim, state], `inputs` [rows, steps, ...] each."""
    return _each(_step)(states, *(v[:, t] for v in inputs))


def _each(form):
    """`form` for several rows; one row goes without an axis of size 1 (see `_axes`)."""

    def call(*arguments):
        return form(*(v[0] for v in arguments))[None] if len(arguments[0]) == 1 else jax.vmap(form)(*arguments)

    return call


def _prepare(x, dt, a, b, c, d):
    """What does not depend on the state, in float32: each step's decay, what is fed in, b, c and the skip; no NaN."""
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=2)[..., None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    dt, a, d = (v.astype(F32) for v in (dt, a, d))
    return jnp.exp(dt * a), dt[..., None] * x, b, c, d[:, None] * x


def _step(state, decay, fed, b):
    """The next state of one row, in the store's precision: the same as one step in each of several calls.

    state [heads, head_dim, state], decay [heads], fed [heads, head_dim], b [groups, state].
    """
    split, shared = _axes(fed.shape[0], b.shape[0])
    old = state.astype(F32).reshape(*split, fed.shape[1], -1)
    new = old * decay.reshape(*split, 1, 1) + fed.reshape(*split, -1, 1) * b.reshape(*shared, 1, -1)
    return new.reshape(state.shape).astype(state.dtype)


def _read(state, c):
    """y [heads, head_dim] of one row."""
    split, shared = _axes(state.shape[0], c.shape[0])
    grouped = state.astype(F32).reshape(*split, *state.shape[1:])
    return (grouped * c.reshape(*shared, 1, -1)).sum(-1).reshape(state.shape[:2])


def _axes(heads, groups):
    """Axes (groups, repeats) of the heads, and what b and c, shared by a group's heads, have in their place.

    Without axes of size 1, with which XLA:CPU's reduction takes eight times as long.
    """
    both = [(groups, groups), (heads // groups, 1)]
    split = [size for size, _ in both if size > 1] or [1]
    return split, [shared for size, shared in both if size > 1] or [1]
