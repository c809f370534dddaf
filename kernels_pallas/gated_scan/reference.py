"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.gated_norm import reference as gated_norm
from kernels_pallas.recurrence import Entry
from kernels_pallas.recurrence import reference as recurrence


def gated_scan(
    zx, query, key, log_decay, strength, skip, weight, bias, norm, store, windows, packed, *, eps,
    norm_before_gate=False,
):  # fmt: skip
    """Implements `api.gated_scan`. Returns the output in float64 (0 for padding), and both stores."""
    at, valid = np.asarray(packed.tile_tokens), np.asarray(packed.tile_valid)
    z, x = np.asarray(zx).astype(np.float64).swapaxes(0, 1)
    x, windows = convolution.causal_conv1d_prefill(x, weight, bias, windows, packed)
    x, query, key = (np.asarray(v)[at] for v in (x.reshape(len(x), *store.shape[1:3]), query, key))
    log_decay, strength = (np.where(valid[..., None], np.asarray(v)[at], 0) for v in (log_decay, strength))
    entry = Entry(query, key, x, log_decay, strength)
    of_tiles, store = recurrence.recurrence_scan(entry, store, packed.tiles, erase=False, skip=skip)
    y = np.zeros_like(z)
    y[at[valid]] = of_tiles[valid].reshape(-1, y.shape[1])
    if norm is None:
        return y * z / (1 + np.exp(-z)), store, windows
    out = gated_norm.gated_rms_norm(y, z, norm, groups=key.shape[2], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows
