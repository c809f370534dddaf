"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.gated_norm import reference as gated_norm
from kernels_pallas.ssd_scan import reference as scan


def gated_scan(
    zx, dt, a, b, c, d, weight, bias, norm, store, windows, *, eps, norm_before_gate=False, **places
):  # fmt: skip
    """Implements `api.gated_scan`. Returns the output in float64 (0 for padding), and both stores."""
    at, valid = np.asarray(places["tile_tokens"]), np.asarray(places["tile_valid"])
    z, x = np.asarray(zx).astype(np.float64).swapaxes(0, 1)
    rows = {name: places[name] for name in ("token_row", "row_start", "read_slot", "tile_row", "tile_end")}
    write = places["tile_write_slot"]
    x, windows = convolution.causal_conv1d_prefill(x, weight, bias, windows, write_slot=write, **rows)
    x, b, c = (np.asarray(v)[at] for v in (x.reshape(len(x), *store.shape[1:3]), b, c))
    dt = np.where(valid[..., None], np.asarray(dt)[at], 0)
    slots = {"tile_first": places["tile_first"], "read_slot": places["tile_read_slot"], "write_slot": write}
    of_tiles, store = scan.ssd_scan(x, dt, a, b, c, d, store, **slots)
    y = np.zeros_like(z)
    y[at[valid]] = of_tiles[valid].reshape(-1, y.shape[1])
    if norm is None:
        return y * z / (1 + np.exp(-z)), store, windows
    out = gated_norm.gated_rms_norm(y, z, norm, groups=b.shape[2], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows
