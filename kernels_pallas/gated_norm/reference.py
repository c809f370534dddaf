"""The gated norm's definition, in float64 numpy."""

import numpy as np


def gated_rms_norm(y, z, weight, *, groups, eps, norm_before_gate=False, activation="silu"):
    """Implements `api.gated_rms_norm`, in float64."""
    y, z, weight = (np.asarray(v).astype(np.float64) for v in (y, z, weight))
    gate, out = (z if activation == "silu" else 1) / (1 + np.exp(-z)), np.zeros_like(y)
    value = y if norm_before_gate else y * gate
    size = y.shape[-1] // groups
    for g in range(groups):
        part = slice(g * size, (g + 1) * size)
        mean = (value[..., part] ** 2).mean(-1, keepdims=True)
        out[..., part] = value[..., part] / np.sqrt(mean + eps) * weight[part]
    return out * gate if norm_before_gate else out
