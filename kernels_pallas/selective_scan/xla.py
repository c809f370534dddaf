"""The selective scan in plain JAX: blocks of tokens, the state carried from block to block.

On CPU the tokens of a block run one after the other. Elsewhere a block is an associative scan (Blelloch, 1990), because
each step of a loop would be a kernel of its own. Decays are at most 1, so that neither form divides or overflows.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas import row_loop, tails
from kernels_pallas.selective_scan.entry import SelectiveEntry
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens of a block: the associative scan holds a few arrays [BLOCK, state, inner] in float32 (16 MiB each for 8192
# channels and states of 16).
BLOCK = 32


def _scan_sequence(form, entry, *, a, d, initial_state):
    return scan_sequence(_block(form, a, d), entry, entry.x, initial_state, size=BLOCK)


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


def _replay(loop, entry, states, tail, places, a, d):
    real = jnp.arange(entry.x.shape[1]) < places.num_tokens[:, None]
    tail = type(tail)(*tails.append(tail, (entry.x, entry.b, entry.dt), places))

    def absorb(state, x, b, dt):
        return _next(state, dt, dt * x, a.astype(F32), b)

    entry = entry._replace(dt=jnp.where(real[..., None], entry.dt, 0))
    y, states = _steps(
        functools.partial(row_loop.replay, loop, absorb=absorb, rings=tail, places=places), entry, states, a=a, d=d
    )
    return y, states, tail


def _update(loop, entry, store, rows, *, a, d):
    return _steps(functools.partial(loop, rows=rows), entry, store, a=a, d=d)


def _steps(run, entry, store, *, a, d):
    x, b, c, dt = entry.masked()

    def token(state, dt, fed, b, c):
        state = _next(state.astype(F32), dt, fed, a.astype(F32), b).astype(state.dtype)
        return state, _read(state, c)

    y, store = run(token, (dt, dt * x, b, c), store=store)
    return (y + d.astype(F32) * x).astype(entry.x.dtype), store


_FORMS, _LOOPS = (_one_by_one, _together), (row_loop.row_blocks, row_loop.all_rows)
selective_scan_sequence = row_loop.by_platform(*(functools.partial(_scan_sequence, form) for form in _FORMS))
"""See `api.selective_scan_sequence`; the next ones are `api.selective_scan` and `api.selective_update`."""
selective_scan = row_loop.by_platform(*(functools.partial(_scan_tiles, form) for form in _FORMS))
selective_update = row_loop.by_platform(*(functools.partial(_update, loop) for loop in _LOOPS))


def selective_replay(entry, states, tail, places, *, a, d):
    return row_loop.replay_by_platform(_replay, entry, states, tail, places, a, d)
