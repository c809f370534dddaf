"""The definition: that of each operation, one after the other, in float64 numpy."""

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.delta_replay import reference as replay
from kernels_pallas.gated_delta_update.reference import gates_of, norm_of, unit_keys


def gated_delta_replay(
    qk, v, z, a, b, a_log, dt_bias, weight, weight_qk, norm, store, tail, windows, ring, windows_qk, ring_qk, *,
    gates, **places,
):  # fmt: skip
    """Implements `api.gated_delta_replay`. Returns the output in float64 (meaningless for padding), and the stores."""
    rows, steps, _ = v.shape
    v, windows, ring = convolution.causal_conv1d_replay(v, weight, None, windows, ring, **places)
    qk, windows_qk, ring_qk = convolution.causal_conv1d_replay(
        qk.reshape(rows, steps, -1), weight_qk, None, windows_qk, ring_qk, **places
    )
    q, k = unit_keys(qk, store.shape[3])
    log_decay, beta = gates_of(a, b, a_log, dt_bias, gates)
    heads = (rows, steps, *store.shape[1:3])
    y, store, tail = replay.delta_replay(store, tail, q, k, v.reshape(heads), log_decay, beta, **places)
    return norm_of(y, z, norm, gates), store, tail, windows, ring, windows_qk, ring_qk
