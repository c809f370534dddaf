"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.gated_update.reference import gate_and_norm
from kernels_pallas.state_replay import reference as replay


def gated_replay(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, tail, windows, ring, windows_bc,
    ring_bc, *, dt_limit, eps, norm_before_gate=False, **places,
):  # fmt: skip
    """Implements `api.gated_replay`. Returns the output in float64 (meaningless for padding), and the stores."""
    rows, steps = zx.shape[:2]
    z, x = (np.asarray(zx)[:, :, n].astype(np.float64) for n in range(2))
    x, windows, ring = convolution.causal_conv1d_replay(x, weight, bias, windows, ring, **places)
    bc, windows_bc, ring_bc = convolution.causal_conv1d_replay(
        bc.reshape(rows, steps, -1), weight_bc, bias_bc, windows_bc, ring_bc, **places
    )
    b, c = bc.reshape(rows, steps, 2, -1, store.shape[3]).swapaxes(0, 2).swapaxes(1, 2)
    dt = np.clip(np.log1p(np.exp(np.float64(dt) + dt_bias)), *dt_limit)
    x = x.reshape(rows, steps, *store.shape[1:3])
    y, store, tail = replay.state_replay(store, tail, x, dt, -np.exp(np.float64(a_log)), b, c, d, **places)
    out = gate_and_norm(y, z, norm, groups=b.shape[2], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, tail, windows, ring, windows_bc, ring_bc
