"""The selective scan in plain JAX: blocks of tokens, the state carried from block to block.

On CPU the tokens of a block run one after the other. Elsewhere a block is an associative scan (Blelloch, 1990), because
each step of a loop would be a kernel of its own. Decays are at most 1, so that neither form divides or overflows.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas import row_loop, tails
from kernels_pallas.slots import load
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens of a block: the associative scan holds a few arrays [BLOCK, state, inner] in float32 (16 MiB each for 8192
# channels and states of 16).
BLOCK = 32


def selective_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """See `api.selective_scan`. The target platform of compilation selects the form."""
    arguments = x, dt, a, b, c, d, store, tile_first, read_slot, write_slot
    return lax.platform_dependent(
        *arguments,
        cpu=functools.partial(_scan_tiles, form=_one_by_one, branch=True),
        default=functools.partial(_scan_tiles, form=_together, branch=False),
    )


def associative(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """Implements the form for platforms other than CPU."""
    places = tile_first, read_slot, write_slot
    return _scan_tiles(x, dt, a, b, c, d, store, *places, form=_together, branch=False)


def selective_scan_sequence(x, dt, a, b, c, d, *, initial_state=None):
    """See `api.selective_scan_sequence`."""
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *a.shape), F32)
    forms = (functools.partial(_scan_sequence, form=form) for form in (_one_by_one, _together))
    cpu, default = forms
    return lax.platform_dependent(x, dt, a, b, c, d, initial_state, cpu=cpu, default=default)


def _scan_sequence(x, dt, a, b, c, d, state, *, form):
    def block(state, x, dt, b, c):
        return _block(form, state, x, dt, a, b, c, d)

    return scan_sequence(block, (x, dt, b, c), x, state, size=BLOCK)


def _scan_tiles(x, dt, a, b, c, d, store, tile_first, read_slot, write_slot, *, form, branch):
    def block(state, x, dt, b, c):
        return _block(form, state, x, dt, a, b, c, d)

    real = (dt != 0).any(axis=2)
    size = max(n for n in range(1, min(x.shape[1], BLOCK) + 1) if x.shape[1] % n == 0)
    places = tile_first, read_slot, write_slot
    return scan_tiles(block, (x, dt, b, c), real, x, store, *places, size=size, branch=branch)


def _block(form, state, x, dt, a, b, c, d):
    """Computes a block of one row: state [state, inner] float32, x and dt [size, inner], b and c [size, state].

    Returns the state after the block and y [size, inner], both float32.
    """
    x, dt, b, c = _masked(x, dt, b, c)
    state, y = form(state, dt, dt * x, a.astype(F32), b, c)
    return state, y + d.astype(F32) * x


def _masked(x, dt, b, c):
    """Converts all to float32, with zeros for padding, which may hold NaN: 0 * NaN is NaN."""
    real = (dt != 0).any(axis=-1, keepdims=True)
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    return x, dt.astype(F32), b, c


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


def _replay(
    rows, states, tail, x, dt, a, b, c, d, *, anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot,
    interval,
):  # fmt: skip
    entries = tail.x.shape[1]
    order = tails.Order.of(anchor_length, length, num_tokens, entries=entries, steps=x.shape[1])
    tail = type(tail)(*tails.append(tail, (x, b, dt), order, tail_id))
    flat = [v.reshape(-1, v.shape[2]) for v in tail]
    live = num_tokens > 0
    due = tails.next_boundary(length, num_tokens, interval)
    write = order.is_new & (order.new_position + 1 == due.position[:, None])

    def before(state, row):
        """Returns S(length) in float32: one token of the tail after the other, because each has decays of its own."""

        def absorb(n, state):
            position = anchor_length[row] + n
            inputs = (load(v, tail_id[row] * entries + position % entries) for v in flat)
            x, b, dt = (jnp.where(position < length[row], v, 0).astype(F32) for v in inputs)
            return _next(state, dt, dt * x, a.astype(F32), b)

        return lax.fori_loop(0, jnp.where(live, length - anchor_length, 0).max(), absorb, state.astype(F32))

    dt = jnp.where(order.is_new[..., None], dt, 0)
    read_slot, write_slot = jnp.where(live, anchor_slot, 0), jnp.where(write, write_slot[:, None], 0)
    y, states = _update(rows, x, dt, a, b, c, d, states, read_slot=read_slot, write_slot=write_slot, before=before)
    return y, states, tail


def _update(rows, x, dt, a, b, c, d, store, *, read_slot, write_slot, before=None):
    dtype, a = x.dtype, a.astype(F32)
    x, dt, b, c = _masked(x, dt, b, c)

    def step(state, dt, fed, b):
        return _next(state.astype(F32), dt, fed, a, b).astype(state.dtype)

    y, store = rows(step, _read, (dt, dt * x, b), (c,), store, read_slot, write_slot, before=before)
    return (y + d.astype(F32) * x).astype(dtype), store


all_rows = functools.partial(_update, row_loop.all_rows)
selective_update = row_loop.by_platform(cpu=functools.partial(_update, row_loop.row_blocks), default=all_rows)
"""See `api.selective_update`."""
replay_all_rows = functools.partial(_replay, row_loop.all_rows)
selective_replay = row_loop.by_platform(cpu=functools.partial(_replay, row_loop.row_blocks), default=replay_all_rows)
"""See `api.selective_replay`."""
