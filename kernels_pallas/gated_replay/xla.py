"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_replay
from kernels_pallas.fixed_order import exp
from kernels_pallas.gated_update import step_sizes
from kernels_pallas.gated_update.xla import gate_and_norm
from kernels_pallas.state_replay import state_replay


def gated_replay(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, tail, windows, ring, windows_bc,
    ring_bc, *, dt_limit, eps, norm_before_gate, **places,
):  # fmt: skip
    """See `api.gated_replay`."""
    rows, steps, _, inner = zx.shape
    # Flat: a TPU would lay out [rows, steps, 2, inner] anew for each half.
    z, x = jnp.split(zx.reshape(rows, steps, 2 * inner), 2, axis=2)
    x, windows, ring = causal_conv1d_replay(x, weight, bias, windows, ring, **places)
    bc, windows_bc, ring_bc = causal_conv1d_replay(
        bc.reshape(rows, steps, -1), weight_bc, bias_bc, windows_bc, ring_bc, **places
    )
    b, c = (v.reshape(rows, steps, -1, store.shape[3]) for v in jnp.split(bc, 2, axis=2))
    dt = step_sizes(dt, dt_bias, dt_limit)
    x = x.reshape(rows, steps, *store.shape[1:3])
    y, store, tail = state_replay(store, tail, x, dt, -exp(a_log), b, c, d, **places)
    out = gate_and_norm(y, z, norm, groups=b.shape[2], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, tail, windows, ring, windows_bc, ring_bc
