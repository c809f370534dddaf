"""A block of the delta rule's scan by matrix products, where every channel of a key has its own decay.

The block's equations are those of `kernels_pallas.delta_scan.xla`, but a decay is a vector: the product of query t with
key s is a sum over channels n,

    sum_n q_t[n] k_s[n] exp(d_t[n] - d_s[n])        where d is the sum of log decays from the block's start

This is not a matrix product, and a product of q exp(d) and k exp(-d) would overflow. The block is therefore divided
into pieces of increasing size. For s in the first half of a piece and t in the second, the decay between them is the
decay from s to the end of the first half times the decay from there to t. Neither factor is above 1, and both are sums
of only the log decays in between (a difference of long sums would lose the digits of recent decays). Each pair of
tokens is in different halves of a piece for exactly one size of pieces.

The form, with two levels of pieces instead of many: "Kimi Linear" (Kimi Team, 2025), section on the chunkwise form.
"""

import functools

import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.delta_scan.inverse import unit_lower_inverse

F32 = jnp.float32
_dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


def block(state, q, k, v, log_decay, beta):
    """A block of one row: state [heads, head_dim, state] f32, q and k [size, groups, state], v [size, heads, head_dim],
    log_decay [size, heads, state], beta [size, heads]. Returns the state after it and y [size, heads, head_dim].

    In the names of axes: h heads, t and s tokens, p head_dim, n state.
    """
    count, heads = beta.shape
    # Repeated halving needs a power of two; the added tokens are padding.
    size = 1 << (count - 1).bit_length()
    q, k, v, log_decay, beta = (
        jnp.pad(one, [(0, size - count)] + [(0, 0)] * (one.ndim - 1)) for one in (q, k, v, log_decay, beta)
    )
    # Padding may hold NaN, and 0 * NaN is NaN: the values are masked as well as beta.
    real = (beta != 0).any(axis=1)[:, None, None]
    q, k, v, log_decay = (jnp.where(real, one, 0).astype(F32) for one in (q, k, v, log_decay))
    q, k = (jnp.repeat(one, heads // one.shape[1], axis=1) for one in (q, k))
    q, k, v, log_decay = (one.swapaxes(0, 1) for one in (q, k, v, log_decay))
    beta = beta.T[..., None].astype(F32)

    scores, since, until = decayed_products(jnp.concatenate([k, q], axis=1), k, log_decay)
    from_start = jnp.exp(since)
    below, within = scores[:, :size] * beta, scores[:, size:]
    within = within + jnp.eye(size, dtype=F32) * _dot("htn,htn->ht", q, k)[..., None]
    inverse = unit_lower_inverse(below, functools.partial(_dot, "hts,hsu->htu"))
    u = _dot("hts,hsp->htp", inverse, beta * (v - _dot("htn,hpn->htp", from_start * k, state)))
    y = _dot("htn,hpn->htp", from_start * q, state) + _dot("hts,hsp->htp", within, u)
    added = _dot("htp,htn->hpn", u, jnp.exp(until) * k)
    return state * from_start[:, -1:] + added, y.swapaxes(0, 1)[:count]


def decayed_products(asked: Array, k: Array, log_decay: Array) -> tuple[Array, Array, Array]:
    """Computes products of vectors with the keys of earlier tokens, decayed channel by channel.

    Args:
        asked: vectors [heads, n * size, state]: n of each token, one set of all tokens after the other.
        k: [heads, size, state], size a power of two; log_decay likewise, at most 0.
    Returns:
        products [heads, n * size, size], zeros except for earlier tokens; and the sums of log decays [heads, size,
        state] from the start up to and including each token, and from after each token to the end.
    """
    heads, size, state = k.shape
    sets = asked.shape[1] // size
    since, until = log_decay, jnp.zeros_like(log_decay)
    products = jnp.zeros((heads, sets, size, 1, 1), F32)
    half = 1
    while half < size:
        pieces = (heads, size // (2 * half), 2, half, state)
        keys, to_half_end, from_half_start = (one.reshape(pieces) for one in (k, until, since))
        late = asked.reshape(heads, sets, *pieces[1:])[:, :, :, 1] * jnp.exp(from_half_start[:, None, :, 1])
        corner = _dot("hmitn,hisn->hmits", late, keys[:, :, 0] * jnp.exp(to_half_end[:, :, 0]))
        # A piece's products are those of its halves and, in the corner, those of the second half with the first.
        inner, nothing = products.reshape(heads, sets, -1, 2, half, half), jnp.zeros_like(corner)
        above = jnp.concatenate([inner[:, :, :, 0], nothing], axis=-1)
        products = jnp.concatenate([above, jnp.concatenate([corner, inner[:, :, :, 1]], axis=-1)], axis=-2)
        sums = from_half_start[:, :, :, -1:]  # over whole halves
        after_first = jnp.array([0.0, 1.0], F32)[:, None, None]
        since = (from_half_start + after_first * sums[:, :, :1]).reshape(k.shape)
        until = (to_half_end + (1 - after_first) * sums[:, :, 1:]).reshape(k.shape)
        half *= 2
    return products.reshape(heads, sets * size, size), since, until
