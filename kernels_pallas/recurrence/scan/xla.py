"""The scan in plain JAX: blocks of tokens as matrix products, the state carried along.

Within a block that starts from the state S, and with decay_t the sum of log_decay up to t, what the tokens add,
u_t = strength_t * value_t, is known. If the recurrence erases, u_t = strength_t * (value_t - exp(log_decay_t) * S_{t-1}
. key_t) solve a triangular system (the UT transform):

    u_t + strength_t * sum_{s<t} exp(decay_t - decay_s) * (key_t . key_s) * u_s
        = strength_t * (value_t - exp(decay_t) * S . key_t)
    y_t = exp(decay_t) * S . query_t + sum_{s<=t} exp(decay_t - decay_s) * (query_t . key_s) * u_s

All of it is then float32: the rule feeds back what it computes. Where channels decay on their own, `by_channel` says
what is different.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.recurrence.entry import Entry
from kernels_pallas.recurrence.scan import by_channel
from kernels_pallas.recurrence.scan.inverse import unit_lower_inverse
from kernels_pallas.row_loop import by_platform
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens per product: the work within a block grows with its square, and this many keep the products efficient.
CPU_BLOCK = 32
BLOCK = {True: 64, False: None}
"""Elsewhere, with and without erasing; None: a whole tile."""
CHUNK = {True: 64, False: 128}


def _scan(entry, store, tiles, *, erase, skip, branch):
    size, most = entry.value.shape[1], CPU_BLOCK if branch else BLOCK[erase]
    if most is not None:
        size = max((n for n in range(1, min(size, most) + 1) if size % n == 0), default=1)
    block = _form(entry, erase, skip)
    return scan_tiles(block, entry, entry.real, entry.value, store, tiles, size=size, branch=branch)


scan = by_platform(*(functools.partial(_scan, branch=branch) for branch in (True, False)))
"""See `api.recurrence_scan`. The target platform of compilation selects the blocks."""


def _sequence(entry, *, erase, skip, initial_state, chunk_size, on_cpu):
    chunk = chunk_size or CHUNK[erase]
    size = min(chunk, CPU_BLOCK) if on_cpu else chunk
    return scan_sequence(_form(entry, erase, skip), entry, entry.value, initial_state, size=size)


sequence = by_platform(*(functools.partial(_sequence, on_cpu=on_cpu) for on_cpu in (True, False)))
"""See `api.recurrence_sequence`. On CPU, chunks are cut to `CPU_BLOCK` (see there)."""


def _form(entry, erase, skip):
    """Returns how a block is computed: a function of a state and the numbers of an entry."""
    form = by_channel.block if entry.by_channel else _block

    def block(state, *numbers):
        masked = Entry(*(v.astype(F32) for v in Entry(*numbers).masked()))
        # In lower precisions than float32, products may round as the model's own do; what is fed back may not.
        exact = erase or entry.value.dtype == F32
        dot = functools.partial(
            jnp.einsum,
            preferred_element_type=F32,
            precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        )
        state, y = form(state, masked, erase=erase, dot=dot)
        return state, y if skip is None else y + skip.astype(F32)[:, None] * masked.value

    return block


def _block(state, entry, *, erase, dot):
    """A block of one row, all float32: state [heads, head_dim, state], the entry [size, ...]. Returns the state after
    the block and y [size, heads, head_dim].

    The heads of a group stay together as axes (groups, repeats), so query and key are never repeated. In the names of
    axes: g groups, r repeats, t and s tokens, p head_dim, n state.
    """
    query, key, value, log_decay, strength = entry
    size, heads, head_dim = value.shape
    groups, repeats = key.shape[1], heads // key.shape[1]
    value = value.reshape(size, groups, repeats, head_dim).transpose(1, 2, 0, 3)
    strength, decay = (v.T.reshape(groups, repeats, size, 1) for v in (strength, jnp.cumsum(log_decay, axis=0)))
    state = state.reshape(groups, repeats, head_dim, -1)

    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    # Masked before exp: above the diagonal it could overflow, and its gradient would be NaN.
    within = jnp.exp(jnp.where(row >= column, decay - decay.swapaxes(2, 3), -jnp.inf))
    from_start, u = jnp.exp(decay), strength * value
    if erase:
        below = jnp.where(row > column, dot("tgn,sgn->gts", key, key)[:, None] * within * strength, 0)
        inverse = unit_lower_inverse(below, functools.partial(dot, "grts,grsu->grtu"))
        u = dot("grts,grsp->grtp", inverse, u - strength * from_start * dot("tgn,grpn->grtp", key, state))
    scores = dot("tgn,sgn->gts", query, key)[:, None] * within
    y = from_start * dot("tgn,grpn->grtp", query, state) + dot("grts,grsp->grtp", scores, u)

    last = decay[:, :, -1:]
    added = dot("grtp,tgn->grpn", u * jnp.exp(last - decay), key)
    state = state * jnp.exp(last) + added
    return state.reshape(heads, head_dim, -1), y.transpose(2, 0, 1, 3).reshape(size, heads, head_dim)
