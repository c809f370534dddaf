"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.delta_update import reference as update
from kernels_pallas.gated_norm import reference as gated_norm


def gated_delta_update(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, windows, windows_qk, *, valid, gates, **slots
):  # fmt: skip
    """Implements `api.gated_delta_update`. Returns the output in float64, and the stores."""
    rows, steps, _ = v.shape
    heads, size = (rows, steps, *store.shape[1:3]), store.shape[3]
    v, windows = convolution.causal_conv1d_update(v, weight, None, windows, **slots)
    qk, windows_qk = convolution.causal_conv1d_update(qk.reshape(rows, steps, -1), weight_qk, None, windows_qk, **slots)
    q, k = unit_keys(qk, size)
    log_decay, beta = gates_of(a, b, a_log, dt_bias, gates)
    beta = np.where(valid[..., None], beta, 0)
    y, store = update.delta_update(q, k, v.reshape(heads), log_decay, beta, store, **slots)
    return norm_of(y, z, norm, gates), store, windows, windows_qk


def unit_keys(qk, size):
    """Queries and keys [rows, steps, groups, size] of length 1; queries are also scaled."""
    q, k = qk.reshape(*qk.shape[:2], 2, -1, size).swapaxes(0, 2).swapaxes(1, 2)
    q, k = (one / np.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    return q / np.sqrt(size), k


def gates_of(a, b, a_log, dt_bias, gates):
    """Logs of decays and strengths."""
    a, rate = np.float64(a) + dt_bias, np.exp(np.float64(a_log))
    if a.shape != b.shape:
        a, rate = a.reshape(*b.shape, -1), rate[:, None]
    bound = gates.log_decay_bound
    log_decay = -rate * np.log1p(np.exp(a)) if bound is None else bound / (1 + np.exp(-rate * a))
    return log_decay, gates.beta_scale / (1 + np.exp(-np.float64(b)))


def norm_of(y, z, norm, gates):
    """The gated norm of each head."""
    out = gated_norm.gated_rms_norm(
        y, np.reshape(z, y.shape), norm, groups=1, eps=gates.eps, norm_before_gate=True, activation=gates.output
    )
    return out.reshape(*y.shape[:2], -1)
