"""The definition: that of each operation, one after the other, in float64 numpy."""

import numpy as np

from kernels_pallas.causal_conv1d import reference as convolution
from kernels_pallas.gated_norm import reference as gated_norm
from kernels_pallas.recurrence import Entry
from kernels_pallas.recurrence import reference as recurrence
from kernels_pallas.token_loop import wide


def gated_scan(zx, query, key, log_decay, strength, weights, store, windows, packed, *, gates):
    """Implements `api.gated_scan`. Returns the output in float64 (0 for padding), and both stores."""
    at, valid = np.asarray(packed.tile_tokens), np.asarray(packed.tile_valid)
    z, x = wide(zx).swapaxes(0, 1)
    x, windows = convolution.causal_conv1d_prefill(x, weights.value_taps, weights.value_bias, windows, packed)
    x, query, key = (np.asarray(v)[at] for v in (x.reshape(len(x), *store.shape[1:3]), query, key))
    log_decay, strength = (np.where(valid[..., None], np.asarray(v)[at], 0) for v in (log_decay, strength))
    entry = Entry(query, key, x, log_decay, strength)
    of_tiles, store = recurrence.recurrence_scan(entry, store, packed.tiles, erase=False, skip=weights.skip)
    y = np.zeros_like(z)
    y[at[valid]] = of_tiles[valid].reshape(-1, y.shape[1])
    return _output(y, z, key.shape[2], weights, gates), store, windows


def gated_update(projections, weights, store, windows, rows, *, valid, gates):
    """Implements `api.gated_update`. Returns the output in float64, the store and the windows."""
    inputs = projections.value, _flat(projections.vectors), weights, windows, rows
    value, vectors, windows = _convolved(convolution.causal_conv1d_update, *inputs)
    entry = _entry(projections, weights, value, vectors, store, gates)
    entry = entry._replace(strength=np.where(valid[..., None], entry.strength, 0))
    y, store = recurrence.recurrence_update(entry, store, rows, erase=gates.erase, skip=weights.skip)
    return _output(y, projections.gate, projections.vectors.shape[3], weights, gates), store, windows


def gated_replay(projections, weights, store, tail, windows, places, *, gates):
    """Implements `api.gated_replay`. Returns the output in float64 (meaningless for padding), and the stores."""
    inputs = projections.value, _flat(projections.vectors), weights, windows, places
    value, vectors, windows = _convolved(convolution.causal_conv1d_replay, *inputs)
    entry = _entry(projections, weights, value, vectors, store, gates)
    y, store, tail = recurrence.recurrence_replay(entry, store, tail, places, erase=gates.erase, skip=weights.skip)
    return _output(y, projections.gate, projections.vectors.shape[3], weights, gates), store, tail, windows


def _convolved(operation, value, vectors, weights, windows, places):
    stores = [v for v in windows if v is not None]
    value, *of_value = operation(value, weights.value_taps, weights.value_bias, *stores[::2], places)
    vectors, *of_vectors = operation(vectors, weights.vector_taps, weights.vector_bias, *stores[1::2], places)
    return value, vectors, [v for pair in zip(of_value, of_vectors, strict=True) for v in pair]


def _flat(vectors):
    return vectors.reshape(*vectors.shape[:2], -1)


def _entry(projections, weights, value, vectors, store, gates):
    heads, head_dim, size = store.shape[1:]
    query, key = vectors.reshape(*vectors.shape[:2], 2, -1, size).swapaxes(0, 2).swapaxes(1, 2)
    value, rate, given = value.reshape(*value.shape[:2], heads, head_dim), np.exp(wide(weights.a_log)), projections
    if not gates.erase:
        strength = np.clip(np.log1p(np.exp(wide(given.strength) + weights.dt_bias)), *gates.limit)
        return Entry(key, query, value, -rate * strength, strength)
    query, key = (v / np.sqrt((v**2).sum(-1, keepdims=True) + 1e-6) for v in (query, key))
    decay, bound = wide(given.decay) + weights.dt_bias, gates.log_decay_bound
    if decay.shape[-1] != heads:
        decay, rate = decay.reshape(*value.shape[:3], -1), rate[:, None]
    log_decay = -rate * np.log1p(np.exp(decay)) if bound is None else bound / (1 + np.exp(-rate * decay))
    return Entry(query / np.sqrt(size), key, value, log_decay, gates.beta_scale / (1 + np.exp(-wide(given.strength))))


def _output(y, gate, groups, weights, gates):
    gate = wide(gate)
    if weights.norm is None:
        return y.reshape(gate.shape) * gate / (1 + np.exp(-gate))
    norm, options = weights.norm, {"eps": gates.eps, "norm_before_gate": gates.norm_before_gate}
    if gates.erase:
        out = gated_norm.gated_rms_norm(
            y, gate.reshape(y.shape), norm, groups=1, activation=gates.activation, **options
        )
        return out.reshape(gate.shape)
    return gated_norm.gated_rms_norm(y.reshape(gate.shape), gate, norm, groups=groups, **options)
