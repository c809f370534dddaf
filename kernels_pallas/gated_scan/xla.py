"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_prefill
from kernels_pallas.gated_norm import gated, gated_rms_norm
from kernels_pallas.ssd_scan import ssd_scan


def gated_scan(zx, dt, a, b, c, d, weight, bias, norm, store, windows, *, eps, norm_before_gate, **places):
    """See `api.gated_scan`."""
    tokens, _, inner = zx.shape
    # Flat: a TPU would lay out [tokens, 2, inner] anew for each half.
    z, x = jnp.split(zx.reshape(tokens, 2 * inner), 2, axis=1)
    x, windows = causal_conv1d_prefill(
        x,
        weight,
        bias,
        windows,
        write_slot=places["tile_write_slot"],
        **{name: places[name] for name in ("token_row", "row_start", "read_slot", "tile_row", "tile_end")},
    )
    tile_tokens, valid = places["tile_tokens"], places["tile_valid"]

    def by_tile(v, *shape):  # some token where there is none: the scan knows padding by its steps of 0
        return v.reshape(tokens, -1)[tile_tokens].reshape(*tile_tokens.shape, *shape)

    y, store = ssd_scan(
        by_tile(x, *store.shape[1:3]),
        jnp.where(valid[..., None], dt[tile_tokens], 0),
        a,
        by_tile(b, *b.shape[1:]),
        by_tile(c, *c.shape[1:]),
        d,
        store,
        tile_first=places["tile_first"],
        read_slot=places["tile_read_slot"],
        write_slot=places["tile_write_slot"],
    )
    y = y.reshape(-1, inner)[places["token_in_tiles"]]
    if norm is None:
        out = gated(y, z)
    else:
        out = gated_rms_norm(y, z, norm, groups=b.shape[1], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows
