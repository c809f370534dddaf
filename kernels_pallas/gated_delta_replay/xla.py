"""The operations one after the other, each with its own implementation."""

import jax.numpy as jnp

from kernels_pallas.causal_conv1d import causal_conv1d_replay
from kernels_pallas.delta_replay import delta_replay
from kernels_pallas.gated_delta_update import decays_and_strengths, unit
from kernels_pallas.gated_delta_update.xla import norm_of


def gated_delta_replay(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, tail, windows, ring, windows_qk, ring_qk, *,
    gates, **places,
):  # fmt: skip
    """See `api.gated_delta_replay`."""
    rows, steps, _ = v.shape
    v, windows, ring = causal_conv1d_replay(v, weight, None, windows, ring, **places)
    convolved, windows_qk, ring_qk = causal_conv1d_replay(
        qk.reshape(rows, steps, -1), weight_qk, None, windows_qk, ring_qk, **places
    )
    q, k = (one.reshape(rows, steps, *qk.shape[3:]) for one in jnp.split(convolved, 2, axis=2))
    log_decay, beta = decays_and_strengths(a, b, a_log, dt_bias, gates)
    y, store, tail = delta_replay(
        store, tail, unit(q, qk.shape[4] ** -0.5), unit(k), v.reshape(rows, steps, *store.shape[1:3]), log_decay, beta,
        **places,
    )  # fmt: skip
    return norm_of(y, z, norm, gates), store, tail, windows, ring, windows_qk, ring_qk
