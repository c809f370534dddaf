"""A block of the scan by matrix products, where every channel of a key has its own decay.

The block's equations are those of `kernels_pallas.recurrence.scan.xla`, but a decay is a vector: the product of query t
with key s is a sum over channels n,

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

from kernels_pallas.recurrence.scan.inverse import unit_lower_inverse

F32 = jnp.float32
_dot = functools.partial(jnp.einsum, preferred_element_type=F32, precision=lax.Precision.HIGHEST)


def block(state, entry, *, erase, dot):
    """As `kernels_pallas.recurrence.scan.xla`'s, with log_decay [size, heads, state].

    In the names of axes: h heads, t and s tokens, p head_dim, n state.
    """
    count, heads = entry.strength.shape
    # Repeated halving needs a power of two; the added tokens are padding.
    size = 1 << (count - 1).bit_length()
    query, key, value, log_decay, strength = (jnp.pad(v, [(0, size - count)] + [(0, 0)] * (v.ndim - 1)) for v in entry)
    query, key = (jnp.repeat(v, heads // v.shape[1], axis=1) for v in (query, key))
    query, key, value, log_decay = (v.swapaxes(0, 1) for v in (query, key, value, log_decay))
    strength = strength.T[..., None]

    asked = jnp.concatenate([key, query], axis=1) if erase else query
    scores, since, until = decayed_products(asked, key, log_decay)
    from_start, u = jnp.exp(since), strength * value
    within = scores[:, -size:] + jnp.eye(size, dtype=F32) * dot("htn,htn->ht", query, key)[..., None]
    if erase:
        inverse = unit_lower_inverse(scores[:, :size] * strength, functools.partial(dot, "hts,hsu->htu"))
        u = dot("hts,hsp->htp", inverse, u - strength * dot("htn,hpn->htp", from_start * key, state))
    y = dot("htn,hpn->htp", from_start * query, state) + dot("hts,hsp->htp", within, u)
    added = dot("htp,htn->hpn", u, jnp.exp(until) * key)
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
