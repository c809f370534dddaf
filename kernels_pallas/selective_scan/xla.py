"""The selective scan in plain JAX: blocks of tokens, the state carried from block to block.

On CPU the tokens of a block run one after the other. Elsewhere a block is an associative scan (Blelloch, 1990), because
each step of a loop would be a kernel of its own. Decays are at most 1, so that neither form divides or overflows.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas import row_loop, tails
from kernels_pallas.dispatch import differentiable
from kernels_pallas.places import Rows
from kernels_pallas.selective_scan.entry import SelectiveEntry
from kernels_pallas.slots import load
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens of a block: the associative scan holds a few arrays [BLOCK, state, inner] in float32 (16 MiB each for 8192
# channels and states of 16).
BLOCK = 32


def selective_scan_sequence(entry, *, a, d, initial_state=None):
    """See `api.selective_scan_sequence`. The target platform of compilation selects the form."""
    if initial_state is None:
        initial_state = jnp.zeros((entry.x.shape[0], *a.shape), F32)
    cpu, default = (functools.partial(_scan_sequence, form) for form in (_one_by_one, _together))
    return lax.platform_dependent(entry, a, d, initial_state, cpu=cpu, default=default)


def _scan_sequence(form, entry, a, d, state):
    return scan_sequence(_block(form, a, d), entry, entry.x, state, size=BLOCK)


def _scan_tiles(form, entry, store, tiles, *, a, d):
    length = entry.x.shape[1]
    size = max((n for n in range(1, min(length, BLOCK) + 1) if length % n == 0), default=1)
    block, branch = _block(form, a, d), form is _one_by_one
    return scan_tiles(block, entry, entry.real, entry.x, store, tiles, size=size, branch=branch)


def _block(form, a, d):
    """Returns how a block of one row is computed, of a state [state, inner] in float32 and the tokens of an entry: the
    state after the block and y [size, inner], both float32.
    """

    def block(state, *tokens):
        x, b, c, dt = SelectiveEntry(*tokens).masked()
        state, y = form(state, dt, dt * x, a.astype(F32), b, c)
        return state, y + d.astype(F32) * x

    return block


def _next(state, dt, fed, a, b):
    """Returns the state after one more token: state and a [state, inner], dt and fed [inner], b [state]."""
    return jnp.exp(dt * a) * state + fed * b[:, None]


def _read(state, c):
    """Returns the sum over a state's entries, weighted by c [state]: [inner]."""
    return (state.astype(F32) * c[:, None]).sum(0)


def _one_by_one(state, dt, fed, a, b, c):
    def token(state, inputs):
        dt, fed, b, c = inputs
        state = _next(state, dt, fed, a, b)
        return state, _read(state, c)

    return lax.scan(token, state, (dt, fed, b, c))


def _together(state, dt, fed, a, b, c):
    def combine(first, second):
        return first[0] * second[0], first[1] * second[0] + second[1]

    decay = jnp.exp(dt[:, None] * a)
    added = fed[:, None] * b[:, :, None]
    added = added.at[0].add(decay[0] * state)
    _, states = lax.associative_scan(combine, (decay, added))
    return states[-1], (states * c[:, :, None]).sum(1)


def _replay(loop, entry, states, tail, places, *, a, d, every_entry=False):
    entries, anchor_length, length = tail.x.shape[1], places.anchor_length, places.length
    order = tails.Order.of(places, entries=entries, steps=entry.x.shape[1])
    tail = type(tail)(*tails.append(tail, (entry.x, entry.b, entry.dt), order, places.tail_id))
    flat = [v.reshape(-1, v.shape[2]) for v in tail]
    write = order.is_new & (order.new_position + 1 == places.boundary[:, None])

    def before(state, row):
        """Returns S(length) in float32: one token of the tail after the other, because each has decays of its own."""

        def absorb(n, state):
            position = anchor_length[row] + n
            inputs = (load(v, places.tail_id[row] * entries + position % entries) for v in flat)
            x, b, dt = (jnp.where(position < length[row], v, 0).astype(F32) for v in inputs)
            return _next(state, dt, dt * x, a.astype(F32), b)

        longest = jnp.where(places.num_tokens > 0, length - anchor_length, 0).max(initial=0)
        return lax.fori_loop(0, entries if every_entry else longest, absorb, state.astype(F32))

    entry = entry._replace(dt=jnp.where(order.is_new[..., None], entry.dt, 0))
    rows = Rows(places.live_anchor, jnp.where(write, places.write_slot[:, None], 0))
    y, states = _update(loop, entry, states, rows, a=a, d=d, before=before)
    return y, states, tail


def _update(loop, entry, store, rows, *, a, d, before=None):
    x, b, c, dt = entry.masked()

    def step(state, dt, fed, b):
        return _next(state.astype(F32), dt, fed, a.astype(F32), b).astype(state.dtype)

    y, store = loop(step, _read, (dt, dt * x, b), (c,), store, rows, before=before)
    return (y + d.astype(F32) * x).astype(entry.x.dtype), store


_LOOPS = row_loop.row_blocks, row_loop.all_rows
selective_scan = row_loop.by_platform(*(functools.partial(_scan_tiles, form) for form in (_one_by_one, _together)))
"""See `api.selective_scan`; the next one is `api.selective_update`."""
selective_update = row_loop.by_platform(*(functools.partial(_update, loop) for loop in _LOOPS))


def selective_replay(entry, states, tail, places, *, a, d):

    def of(form):
        return lambda entry, states, tail, places, a, d: form(entry, states, tail, places, a=a, d=d)

    by_platform = row_loop.by_platform(*(functools.partial(_replay, loop) for loop in _LOOPS))
    # A loop whose end is found at run time has no derivative.
    plain = functools.partial(_replay, row_loop.all_rows, every_entry=True)
    return differentiable(of(by_platform), of(plain))(entry, states, tail, places, a, d)
