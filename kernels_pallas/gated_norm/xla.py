"""The gated norm in plain JAX."""

import jax
import jax.numpy as jnp

F32 = jnp.float32


def gated_rms_norm(y, z, weight, *, groups, eps, norm_before_gate=False):
    """See `api.gated_rms_norm`."""
    gate = jax.nn.silu(z.astype(F32))
    value = y.astype(F32) if norm_before_gate else y.astype(F32) * gate
    grouped = value.reshape(*y.shape[:-1], groups, -1)
    scale = jax.lax.rsqrt(jnp.square(grouped).mean(-1, keepdims=True) + eps)
    out = (grouped * scale).reshape(y.shape) * weight.astype(F32)
    return (out * gate if norm_before_gate else out).astype(y.dtype)
