"""Causal attention with grouped keys and values, with or without rotary positions."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import sigmoid
from mamba_jax.config import AttentionConfig, need
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, RMSNorm, constant, scaled, scaled_by
from mamba_jax.modules.rotary import rotate, rotations
from mamba_jax.sharding.axis import axis_index


class Attention(nnx.Module):
    """softmax(scale * q k^T) v. No weights are tied to a position, so the same module can be used several times."""

    def __init__(self, config: AttentionConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config

        def project(heads: int) -> Linear:
            return Linear(config.input_size, heads * config.head_dim, bias=config.bias, rngs=rngs, dtype=dtype)

        def norm(heads: int) -> RMSNorm | None:
            qk = config.qk_norm
            if qk is None:
                return None
            size = config.head_dim * (heads if qk.all_heads else 1)
            return RMSNorm(size, qk.eps, unit_offset=qk.unit_offset, dtype=dtype)

        self.q_proj = project(config.num_heads * (2 if config.output_gate else 1))
        self.k_proj = project(config.num_kv_heads)
        self.v_proj = project(config.num_kv_heads)
        self.q_norm, self.k_norm = norm(config.num_heads), norm(config.num_kv_heads)
        inner, bias = config.num_heads * config.head_dim, config.bias or config.output_bias
        self.o_proj = Linear(inner, hidden_size, bias=bias, rngs=rngs, dtype=dtype)
        self.gate_proj = (
            Linear(config.input_size, config.num_heads, rngs=rngs, dtype=dtype) if config.head_gate else None
        )
        self.k_scale = nnx.Param(constant(1, (), jnp.float32)) if config.kv_scales else None
        self.v_scale = nnx.Param(constant(1, (), jnp.float32)) if config.kv_scales else None

    def __call__(
        self,
        x: Float[Array, "T inputs"],
        layout: Layout,
        state: Array | None,
        *,
        added: tuple[Array, Array, Array] | None = None,
        first_key: int = 0,
    ) -> tuple[Float[Array, "T hidden"], Array | None]:
        """`added` is what an adapter adds to queries, keys and values, each [T, heads * head_dim].

        With `first_key` the sequence begins there: earlier keys are hidden, and rotary positions count from it.
        """
        config = self.config
        x = scaled(x, config.input_multiplier)
        flat = [project(x, layout.adapter) for project in (self.q_proj, self.k_proj, self.v_proj)]
        if added is not None:
            flat = [one + more for one, more in zip(flat, added, strict=True)]
        gate, heads = None, (x.shape[0], -1, config.head_dim)
        if config.output_gate:
            both = flat[0].reshape(x.shape[0], -1, 2, config.head_dim)
            flat[0], gate = both[:, :, 0], both[:, :, 1]
        if config.qk_norm is not None and config.qk_norm.all_heads:
            flat[0] = need(self.q_norm).of_part(flat[0], config.num_heads * config.head_dim)
            flat[1] = need(self.k_norm).of_part(flat[1], config.num_kv_heads * config.head_dim)
        q, k, v = (one.reshape(heads) for one in flat)
        k, v = (self._own_heads(one, q.shape[1]) for one in (k, v))
        if config.qk_norm is not None and not config.qk_norm.all_heads:
            q, k = need(self.q_norm)(q), need(self.k_norm)(k)
        k = scaled(k, config.key_multiplier)
        if config.rope is not None:
            cos, sin = rotations(layout.positions - first_key, config.rope)
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scales = self._scales(state)
        if scales is not None:  # (q k_scale) (k / k_scale), and v likewise
            q, k, v = scaled_by(q, scales[0]), scaled_by(k, 1 / scales[0]), scaled_by(v, 1 / scales[1])
        out, state = layout.attend(q, k, v, state, scale=config.scale, first_key=first_key, window=config.window)
        if scales is not None:
            out = scaled_by(out, scales[1])
        if gate is not None:
            out = out * sigmoid(gate)
        if self.gate_proj is not None:
            out *= sigmoid(self.gate_proj(x, layout.adapter, out_dtype=jnp.float32)).astype(out.dtype)[..., None]
        return scaled(self.o_proj(out.reshape(x.shape[0], -1), layout.adapter), config.output_multiplier), state

    def keys_values(
        self, x: Float[Array, "T inputs"], layout: Layout
    ) -> tuple[Float[Array, "T kv_heads head_dim"], Float[Array, "T kv_heads head_dim"]]:
        """Returns the keys and values that `__call__` keeps of these inputs, for attention without other options."""
        config = self.config
        k, v = (
            self._own_heads(
                project(x, layout.adapter).reshape(x.shape[0], -1, config.head_dim),
                self.q_proj.weight[...].shape[0] // config.head_dim,
            )
            for project in (self.k_proj, self.v_proj)
        )
        k = k if config.qk_norm is None else need(self.k_norm)(k)
        if config.rope is not None:
            k = rotate(k, *rotations(layout.positions, config.rope))
        return k, v

    def _scales(self, kv: Array | None) -> tuple[Array, Array] | None:
        """Returns the scales of keys and values in an 8-bit cache; None if they are stored unscaled."""
        if self.k_scale is None or self.v_scale is None or kv is None or kv.dtype.itemsize > 1:
            return None
        return self.k_scale[...], self.v_scale[...]

    def _own_heads(self, kv: Float[Array, "T heads head_dim"], queries: int) -> Float[Array, "T own head_dim"]:
        """Returns the one head of keys that this device's queries share, if the device has all heads of keys."""
        devices = self.config.num_heads // queries
        if kv.shape[1] * devices <= self.config.num_kv_heads or devices == 1:
            return kv
        index = axis_index() * self.config.num_kv_heads // devices
        return lax.dynamic_slice_in_dim(kv, index, 1, axis=1)
