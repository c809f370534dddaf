"""The operations one after the other, each with its own implementation."""

import math

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_update
from kernels_pallas.fixed_order import exp, softplus
from kernels_pallas.gated_norm import gated, gated_rms_norm
from kernels_pallas.state_update import state_update


def step_sizes(dt, dt_bias, dt_limit):
    """See `api.step_sizes`."""
    low, high = dt_limit
    return jnp.clip(softplus(dt + dt_bias), low, None if high == math.inf else high)


def gated_update(
    zx, bc, dt, a_log, d, dt_bias, weight, bias, weight_bc, bias_bc, norm, store, windows, windows_bc, *,
    valid, dt_limit, eps, norm_before_gate, **slots,
):  # fmt: skip
    """See `api.gated_update`."""
    rows, steps, _, inner = zx.shape
    # Flat: a TPU would lay out [rows, steps, 2, inner] anew for each half.
    z, x = jnp.split(zx.reshape(rows, steps, 2 * inner), 2, axis=2)
    real = valid[..., None]
    x, windows = causal_conv1d_update(jnp.where(real, x, 0), weight, bias, windows, **slots)
    inputs = jnp.where(real, bc.reshape(rows, steps, -1), 0)
    convolved, windows_bc = causal_conv1d_update(inputs, weight_bc, bias_bc, windows_bc, **slots)
    b, c = (v.reshape(rows, steps, *bc.shape[3:]) for v in jnp.split(convolved, 2, axis=2))
    dt = step_sizes(dt, dt_bias, dt_limit)
    y, store = state_update(
        x.reshape(rows, steps, *store.shape[1:3]), jnp.where(real, dt, 0), -exp(a_log), b, c, d, store, **slots
    )
    out = gate_and_norm(y, z, norm, groups=bc.shape[3], eps=eps, norm_before_gate=norm_before_gate)
    return out, store, windows, windows_bc


def gate_and_norm(y, z, norm, **options):
    """The gate of y [rows, steps, heads, head_dim] by z [rows, steps, inner], with the norm if there is one."""
    flat = (y.shape[0] * y.shape[1], z.shape[2])
    y, gate = y.reshape(flat), z.reshape(flat)
    return (gated(y, gate) if norm is None else gated_rms_norm(y, gate, norm, **options)).reshape(z.shape)
