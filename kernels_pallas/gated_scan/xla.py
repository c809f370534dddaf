"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_prefill
from kernels_pallas.gated_norm import gated, gated_rms_norm
from kernels_pallas.recurrence import Entry, recurrence_scan


def gated_scan(
    zx, query, key, log_decay, strength, skip, weight, bias, norm, store, windows, packed, *, eps, norm_before_gate
):  # fmt: skip
    """See `api.gated_scan`."""
    tokens, _, inner = zx.shape
    # Flat: a TPU would lay out [tokens, 2, inner] anew for each half.
    z, x = jnp.split(zx.reshape(tokens, 2 * inner), 2, axis=1)
    x, windows = causal_conv1d_prefill(x, weight, bias, windows, packed)
    tiles = packed.tile_tokens.shape

    def by_tile(v, *shape):  # some token where there is none: the scan knows padding by its strength of 0
        return v.reshape(tokens, -1)[packed.tile_tokens].reshape(*tiles, *shape)

    entry = Entry(
        by_tile(query, *query.shape[1:]),
        by_tile(key, *key.shape[1:]),
        by_tile(x, *store.shape[1:3]),
        *(jnp.where(packed.tile_valid[..., None], v[packed.tile_tokens], 0) for v in (log_decay, strength)),
    )
    y, store = recurrence_scan(entry, store, packed.tiles, erase=False, skip=skip)
    y = y.reshape(-1, inner)[packed.token_in_tiles]
    if norm is None:
        out = gated(y, z)
    else:
        out = gated_rms_norm(y, z, norm, groups=key.shape[1], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows
