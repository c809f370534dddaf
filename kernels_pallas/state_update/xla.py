"""The state update in plain JAX: row by row in place on CPU, all rows at once elsewhere."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import load, put, read_slots, take, write_slot_if, write_slots

F32 = jnp.float32


def state_update(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """See `api.state_update`. The form is chosen by the platform compiled for, which may not be the one at hand."""
    arguments = x, dt, a, b, c, d, store, read_slot, write_slot
    return lax.platform_dependent(*arguments, cpu=_positional(row_by_row), default=_positional(all_rows))


def _positional(form):
    def call(*arguments):
        return form(*arguments[:-2], read_slot=arguments[-2], write_slot=arguments[-1])

    return call


def all_rows(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """Gathers all rows' states, runs the rows side by side, and scatters."""
    decay, fed, b, c, skip = _prepare(x, dt, a, b, c, d)
    states = read_slots(store, read_slot)
    y, states = jax.vmap(functools.partial(_row, dtype=store.dtype))(states, decay, fed, b, c)
    for t in range(x.shape[1]):
        store = write_slots(store, states[t], write_slot[:, t])
    return (y + skip).astype(x.dtype), store


def row_by_row(x, dt, a, b, c, d, store, *, read_slot, write_slot):
    """A loop over rows, each from slot to slot while its state is in the processor's cache.

    Twice as fast as `all_rows` on CPU at 32 rows, five times at one. A product (`dot`) in the loop would make XLA lay
    out, and copy, the whole store differently.
    """
    rows, steps = x.shape[:2]
    decay, fed, b, c, skip = _prepare(x, dt, a, b, c, d)

    def update(source, index):
        """The loop's body, reading row i's state from source[index[i]]; zeros where the row reads the null slot."""

        def body(i, carry):
            store, y = carry
            # A conditional, because XLA:CPU would repeat a select in every use, and then copy the store for the late
            # ones (seen with small states; `read_slots` says more).
            state = lax.cond(
                read_slot[i] > 0, lambda s: load(s, index[i]), lambda s: jnp.zeros(s.shape[1:], s.dtype), source(store)
            )
            row, states = _row(state, decay[i], fed[i], b[i], c[i], store.dtype)
            for t in range(steps):
                store = write_slot_if(store, states[t], write_slot[i, t])
            return store, put(y, row, i)

        return body

    def read_first(_, carry):
        copies = take(carry[0], read_slot)
        return lax.fori_loop(0, rows, update(lambda _: copies, jnp.arange(rows)), carry)

    # A row that writes what a later row reads needs all reads done first. That is rare, and the copies cost time: it
    # has a loop of its own, of one round or none. (With `cond`, XLA:CPU copies the store.)
    later = jnp.arange(rows)[:, None] < jnp.arange(rows)
    written = (write_slot[:, :, None] == read_slot) & (write_slot[:, :, None] > 0)
    clash = (written.any(axis=1) & later).any().astype(jnp.int32)
    carry = store, jnp.zeros(x.shape, F32)
    carry = lax.fori_loop(0, clash, read_first, carry)
    store, y = lax.fori_loop(0, rows * (1 - clash), update(lambda store: store, read_slot), carry)
    return (y + skip).astype(x.dtype), store


def _prepare(x, dt, a, b, c, d):
    """What does not depend on the state, in float32: each step's decay, what is fed in, b, c and the skip; no NaN."""
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=2)[..., None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    dt, a, d = (v.astype(F32) for v in (dt, a, d))
    return jnp.exp(dt * a), dt[..., None] * x, b, c, d[:, None] * x


def _row(state, decay, fed, b, c, dtype):
    """All steps of one row: state [heads, head_dim, state], decay [steps, heads], fed [steps, heads, head_dim], b and c
    [steps, groups, state]. Returns y [steps, heads, head_dim] in float32 and a list with the state after each step.
    """
    steps, heads, head_dim = fed.shape
    groups, repeats = b.shape[1], heads // b.shape[1]
    # Axes (groups, repeats) without those of size 1, with which XLA:CPU's reduction takes eight times as long.
    split = [n for n in (groups, repeats) if n > 1] or [1]
    shared = [n for n, size in ((groups, groups), (1, repeats)) if size > 1] or [1]
    state = state.astype(F32).reshape(*split, head_dim, -1)
    y, states = [], []
    for t in range(steps):
        bt, ct = (v[t].reshape(*shared, 1, -1) for v in (b, c))
        state = state * decay[t].reshape(*split, 1, 1) + fed[t].reshape(*split, head_dim, 1) * bt
        # In the store's precision from step to step: the same as one step in each of several calls.
        states.append(state.astype(dtype).reshape(heads, head_dim, -1))
        state = state.astype(dtype).astype(F32)
        y.append((state * ct).sum(-1).reshape(heads, head_dim))
    return jnp.stack(y), states
