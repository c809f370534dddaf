"""The scan in plain JAX: blocks of tokens as matrix products, the state carried from block to block."""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens per product on CPU: the work within a block grows with its square, and this many keep the products efficient.
CPU_BLOCK = 32


def ssd_scan(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """See `api.ssd_scan`. The target platform of compilation selects the blocks."""
    size = x.shape[1]
    small = max(n for n in range(1, min(size, CPU_BLOCK) + 1) if size % n == 0)
    arguments = x, dt, a, b, c, d, store, tile_first, read_slot, write_slot
    return lax.platform_dependent(
        *arguments,
        cpu=functools.partial(_scan_tiles, size=small, branch=True),
        default=functools.partial(_scan_tiles, size=size, branch=False),
    )


def whole_tiles(x, dt, a, b, c, d, store, *, tile_first, read_slot, write_slot):
    """Implements the form for platforms other than CPU."""
    places = tile_first, read_slot, write_slot
    return _scan_tiles(x, dt, a, b, c, d, store, *places, size=x.shape[1], branch=False)


def ssd_scan_sequence(x, dt, a, b, c, d, *, initial_state=None, chunk_size=128):
    """See `api.ssd_scan_sequence`. On CPU, chunks are cut to `CPU_BLOCK` (see there)."""
    if initial_state is None:
        initial_state = jnp.zeros((x.shape[0], *x.shape[2:], b.shape[-1]), F32)
    small, whole = (functools.partial(_scan_sequence, size=n) for n in (min(chunk_size, CPU_BLOCK), chunk_size))
    return lax.platform_dependent(x, dt, a, b, c, d, initial_state, cpu=small, default=whole)


def _scan_sequence(x, dt, a, b, c, d, state, *, size):
    def block(state, x, dt, b, c):
        return _block(state, x, dt, a, b, c, d)

    return scan_sequence(block, (x, dt, b, c), x, state, size=size)


def _scan_tiles(x, dt, a, b, c, d, store, tile_first, read_slot, write_slot, *, size, branch):
    def block(state, x, dt, b, c):
        return _block(state, x, dt, a, b, c, d)

    real = (dt != 0).any(axis=2)
    places = tile_first, read_slot, write_slot
    return scan_tiles(block, (x, dt, b, c), real, x, store, *places, size=size, branch=branch)


def _block(state, x, dt, a, b, c, d):
    """A block of one row: state [heads, head_dim, state] f32, x [size, heads, head_dim], dt [size, heads], b and c
    [size, groups, state]. Returns the state after the block and y [size, heads, head_dim], both float32.

    The heads of a group stay together as axes (groups, repeats), so b and c are never repeated.
    """
    size, heads, head_dim = x.shape
    groups, repeats = b.shape[1], heads // b.shape[1]
    # In lower precisions the products may round as the model's own do.
    precision = lax.Precision.HIGHEST if x.dtype == F32 else lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=precision)
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as dt.
    real = (dt != 0).any(axis=1)[:, None, None]
    x, b, c = (jnp.where(real, v, 0).astype(F32) for v in (x, b, c))
    b, c = b.swapaxes(0, 1), c.swapaxes(0, 1)
    dt, a, d = dt.astype(F32), a.astype(F32), d.astype(F32)
    decay = jnp.cumsum(dt * a, axis=0)  # the log of the decay from the block's start, [size, heads]
    by_head = decay.T.reshape(groups, repeats, size)

    lower = jnp.tril(jnp.ones((size, size), bool))
    # Masked before exp: above the diagonal it could overflow, and its gradient would be NaN.
    within = jnp.exp(jnp.where(lower, by_head[..., :, None] - by_head[..., None, :], -jnp.inf))
    weights = dot("gqn,gkn->gqk", c, b)[:, None] * within
    fed = (x * dt[..., None]).swapaxes(0, 1)
    inside = dot("hqk,hkp->hqp", weights.reshape(heads, size, size), fed).swapaxes(0, 1)
    before = dot("gqn,gmn->gqm", c, state.reshape(groups, repeats * head_dim, -1))
    before = before.reshape(groups, size, repeats, head_dim).swapaxes(0, 1).reshape(x.shape)
    y = inside + before * jnp.exp(decay)[..., None] + x * d[:, None]

    to_end = x * (dt * jnp.exp(decay[-1] - decay))[..., None]
    to_end = to_end.reshape(size, groups, repeats * head_dim).swapaxes(0, 1)
    added = dot("gkm,gkn->gmn", to_end, b).reshape(state.shape)
    return state * jnp.exp(decay[-1])[:, None, None] + added, y
