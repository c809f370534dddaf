"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_update
from kernels_pallas.delta_update import delta_update
from kernels_pallas.gated_delta_update.gates import decays_and_strengths, unit
from kernels_pallas.gated_norm import gated_rms_norm


def gated_delta_update(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, windows, windows_qk, *, valid, gates, **slots
):  # fmt: skip
    """See `api.gated_delta_update`."""
    rows, steps, _ = v.shape
    real = valid[..., None]
    v, windows = causal_conv1d_update(jnp.where(real, v, 0), weight, None, windows, **slots)
    inputs = jnp.where(real, qk.reshape(rows, steps, -1), 0)
    convolved, windows_qk = causal_conv1d_update(inputs, weight_qk, None, windows_qk, **slots)
    q, k = (one.reshape(rows, steps, *qk.shape[3:]) for one in jnp.split(convolved, 2, axis=2))
    log_decay, beta = decays_and_strengths(a, b, a_log, dt_bias, gates)
    y, store = delta_update(
        unit(q, qk.shape[4] ** -0.5), unit(k), v.reshape(rows, steps, *store.shape[1:3]), log_decay,
        jnp.where(real, beta, 0), store, **slots,
    )  # fmt: skip
    return norm_of(y, z, norm, gates), store, windows, windows_qk


def norm_of(y, z, norm, gates):
    """The gated norm of each head: of y [rows, steps, heads, head_dim], for z [rows, steps, inner]."""
    heads = (-1, *y.shape[2:])
    out = gated_rms_norm(
        y.reshape(heads), z.reshape(heads), norm, groups=1, eps=gates.eps, norm_before_gate=True,
        activation=gates.output,
    )  # fmt: skip
    return out.reshape(z.shape)
