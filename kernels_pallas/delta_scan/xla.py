"""The scan by the gated delta rule in plain JAX: blocks of tokens as matrix products, the state carried along.

Within a block that starts from the state h, and with decay_t the sum of log_decay up to t, the recurrence's own terms
u_t = beta_t * (v_t - exp(log_decay_t) * h_{t-1} . k_t) solve a triangular system (the UT transform):

    u_t + beta_t * sum_{s<t} exp(decay_t - decay_s) * (k_t . k_s) * u_s = beta_t * (v_t - exp(decay_t) * h . k_t)
    y_t = exp(decay_t) * h . q_t + sum_{s<=t} exp(decay_t - decay_s) * (q_t . k_s) * u_s

All of it is float32: the rule feeds back what it computes. Where channels decay on their own, `by_channel` says what
is different.
"""

import functools

import jax.numpy as jnp
from jax import lax

from kernels_pallas.delta_scan import by_channel
from kernels_pallas.delta_scan.inverse import unit_lower_inverse
from kernels_pallas.tile_loop import scan_sequence, scan_tiles

F32 = jnp.float32
# Tokens per product: the work within a block grows with its square, and this many keep the products efficient.
CPU_BLOCK, BLOCK = 32, 64


def delta_scan(q, k, v, log_decay, beta, store, *, tile_first, read_slot, write_slot):
    """See `api.delta_scan`. The target platform of compilation selects the blocks."""
    cpu, default = (
        functools.partial(_scan_tiles, size=_divisor(v.shape[1], most), branch=branch)
        for most, branch in ((CPU_BLOCK, True), (BLOCK, False))
    )
    arguments = q, k, v, log_decay, beta, store, tile_first, read_slot, write_slot
    return lax.platform_dependent(*arguments, cpu=cpu, default=default)


def delta_scan_sequence(q, k, v, log_decay, beta, *, initial_state=None, chunk_size=64):
    """See `api.delta_scan_sequence`. On CPU, chunks are cut to `CPU_BLOCK` (see there)."""
    if initial_state is None:
        initial_state = jnp.zeros((v.shape[0], *v.shape[2:], k.shape[-1]), F32)
    small, whole = (functools.partial(_scan_sequence, size=n) for n in (min(chunk_size, CPU_BLOCK), chunk_size))
    return lax.platform_dependent(q, k, v, log_decay, beta, initial_state, cpu=small, default=whole)


def _scan_sequence(q, k, v, log_decay, beta, state, *, size):
    return scan_sequence(_form(log_decay), (q, k, v, log_decay, beta), v, state, size=size)


def _scan_tiles(q, k, v, log_decay, beta, store, tile_first, read_slot, write_slot, *, size, branch):
    inputs, real = (q, k, v, log_decay, beta), (beta != 0).any(axis=2)
    places = tile_first, read_slot, write_slot
    return scan_tiles(_form(log_decay), inputs, real, v, store, *places, size=size, branch=branch)


def _form(log_decay):
    """Returns how a block is computed: with a decay for each head, or for each channel of its keys."""
    return _block if log_decay.ndim == 3 else by_channel.block


def _divisor(size, most):
    return max(n for n in range(1, min(size, most) + 1) if size % n == 0)


def _block(state, q, k, v, log_decay, beta):
    """A block of one row: state [heads, head_dim, state] f32, q and k [size, groups, state], v [size, heads, head_dim],
    log_decay and beta [size, heads]. Returns the state after the block and y [size, heads, head_dim], both float32.

    The heads of a group stay together as axes (groups, repeats), so q and k are never repeated. In the names of axes: g
    groups, r repeats, t and s tokens, p head_dim, n state.
    """
    size, heads, head_dim = v.shape
    groups, repeats = k.shape[1], heads // k.shape[1]
    dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=lax.Precision.HIGHEST)
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as beta.
    real = (beta != 0).any(axis=1)
    q, k, v = (jnp.where(real[:, None, None], one, 0).astype(F32) for one in (q, k, v))
    log_decay = jnp.where(real[:, None], log_decay, 0).astype(F32)
    v = v.reshape(size, groups, repeats, head_dim).transpose(1, 2, 0, 3)
    beta, decay = (one.T.reshape(groups, repeats, size, 1) for one in (beta.astype(F32), jnp.cumsum(log_decay, axis=0)))
    state = state.reshape(groups, repeats, head_dim, -1)

    row, column = jnp.arange(size)[:, None], jnp.arange(size)
    # Masked before exp: above the diagonal it could overflow, and its gradient would be NaN.
    within = jnp.exp(jnp.where(row >= column, decay - decay.swapaxes(2, 3), -jnp.inf))
    below = jnp.where(row > column, dot("tgn,sgn->gts", k, k)[:, None] * within * beta, 0)
    inverse = unit_lower_inverse(below, functools.partial(dot, "grts,grsu->grtu"))

    from_start = jnp.exp(decay)
    u = dot("grts,grsp->grtp", inverse, beta * (v - from_start * dot("tgn,grpn->grtp", k, state)))
    scores = dot("tgn,sgn->gts", q, k)[:, None] * within
    y = from_start * dot("tgn,grpn->grtp", q, state) + dot("grts,grsp->grtp", scores, u)

    last = decay[:, :, -1:]
    added = dot("grtp,tgn->grpn", u * jnp.exp(last - decay), k)
    state = state * jnp.exp(last) + added
    return state.reshape(heads, head_dim, -1), y.transpose(2, 0, 1, 3).reshape(size, heads, head_dim)
