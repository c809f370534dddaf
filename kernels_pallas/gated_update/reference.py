"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.gated_norm import reference as gated_norm
from kernels_pallas.state_update import reference as update


def gated_update(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, windows, windows_bc, *,
    valid, dt_limit, eps, norm_before_gate=False, **slots,
):  # fmt: skip
    """Implements `api.gated_update`. Returns the output in float64, and the stores."""
    rows, steps = zx.shape[:2]
    z, x = (np.asarray(zx)[:, :, n].astype(np.float64) for n in range(2))
    x, windows = convolution.causal_conv1d_update(x, weight, bias, windows, **slots)
    bc, windows_bc = convolution.causal_conv1d_update(
        bc.reshape(rows, steps, -1), weight_bc, bias_bc, windows_bc, **slots
    )
    b, c = bc.reshape(rows, steps, 2, -1, store.shape[3]).swapaxes(0, 2).swapaxes(1, 2)
    dt = np.clip(np.log1p(np.exp(np.float64(dt) + dt_bias)), *dt_limit)
    dt = np.where(valid[..., None], dt, 0)
    x = x.reshape(rows, steps, *store.shape[1:3])
    y, store = update.state_update(x, dt, -np.exp(np.float64(a_log)), b, c, d, store, **slots)
    out = gate_and_norm(y, z, norm, groups=b.shape[2], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows, windows_bc


def gate_and_norm(y, z, norm, **options):
    """y multiplied by silu(z), and the gated norm if there is one."""
    y = y.reshape(z.shape)
    return y * z / (1 + np.exp(-z)) if norm is None else gated_norm.gated_rms_norm(y, z, norm, **options)
