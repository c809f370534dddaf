"""The scan in plain JAX: one tile at a time as matrix products, the state carried from tile to tile."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.slots import write_slots

F32 = jnp.float32


def _dot(spec, *operands):
    return jnp.einsum(spec, *operands, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


def _tile(state, x, dt, a, b, c, d):
    """One tile of one row.

    state [heads, head_dim, state] f32, x [tile_size, heads, head_dim], dt [tile_size, heads], b and c [tile_size,
    groups, state]. Returns the state after the tile and y, both float32. The heads of a group stay together as axes
    (groups, repeats), so b and c are never repeated.
    """
    size, heads, head_dim = x.shape
    groups, repeats = b.shape[1], heads // b.shape[1]
    real = (dt != 0).any(axis=1)[:, None, None]
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    x, b, c = (jnp.where(real, v, 0) for v in (x, b, c))
    dt = dt.astype(F32)
    decay = jnp.cumsum(dt * a.astype(F32), axis=0)  # [tile_size, heads], log of the decay from the tile's start
    decay_t, dt_t = (v.T.reshape(groups, repeats, size) for v in (decay, dt))
    last = decay_t[:, :, -1:]
    state = state.reshape(groups, repeats, head_dim, -1)
    xg = x.reshape(size, groups, repeats, head_dim)

    scores = _dot("qgn,kgn->gqk", c, b)
    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before exp: above the diagonal it could overflow, and its gradient would be NaN.
    within = jnp.exp(jnp.where(lower, decay_t[..., :, None] - decay_t[..., None, :], -jnp.inf))
    weights = scores[:, None] * within * dt_t[..., None, :]
    y = _dot("grqk,kgrp->qgrp", weights, xg.astype(F32))
    y += _dot("qgn,grpn->qgrp", c.astype(F32), state) * jnp.exp(decay).reshape(size, groups, repeats, 1)
    to_end = (dt_t * jnp.exp(last - decay_t)).transpose(2, 0, 1)[..., None]
    state = state * jnp.exp(last)[..., None] + _dot("kgrp,kgn->grpn", xg.astype(F32) * to_end, b.astype(F32))
    y = y.reshape(size, heads, head_dim) + d.astype(F32)[:, None] * x.astype(F32)
    return state.reshape(heads, head_dim, -1), y


def ssd_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """See `api.ssd_scan`."""

    def step(state, tile):
        x, dt, b, c, first, slot = tile
        # A select, not a product: the null slot may hold NaN.
        start = jnp.where(slot > 0, store[slot].astype(F32), 0)
        state, y = _tile(jnp.where(first, start, state), x, dt, a, b, c, d)
        kept = state.astype(store.dtype)
        return kept.astype(F32), (y.astype(x.dtype), kept)

    state = jnp.zeros(store.shape[1:], F32)
    _, (y, states) = lax.scan(step, state, (x, dt, b, c, tile_first, read_slot))
    return y, write_slots(store, states, write_slot)


def ssd_scan_sequence(x, dt, a, b, c, d, *, initial_state=None, chunk_size=128):
    """See `api.ssd_scan_sequence`."""
    batch, length, heads, head_dim = x.shape
    size = min(chunk_size, max(length, 1))
    chunks = -(-length // size)

    def cut(v):  # [batch, length, ...] -> [chunks, batch, size, ...]; the padding has dt = 0
        v = jnp.pad(v, [(0, 0), (0, chunks * size - length)] + [(0, 0)] * (v.ndim - 2))
        return v.reshape(batch, chunks, size, *v.shape[2:]).swapaxes(0, 1)

    # Rematerialised: the gradient keeps one state per chunk and not the [heads, size, size] weights.
    @functools.partial(jax.checkpoint, prevent_cse=False)
    def step(state, chunk):
        state, y = jax.vmap(_tile, (0, 0, 0, None, 0, 0, None))(state, chunk[0], chunk[1], a, chunk[2], chunk[3], d)
        return state, y.astype(x.dtype)

    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, head_dim, b.shape[-1]), F32)
    state, y = lax.scan(step, initial_state.astype(F32), tuple(cut(v) for v in (x, dt, b, c)))
    return y.swapaxes(0, 1).reshape(batch, chunks * size, heads, head_dim)[:, :length], state
