"""Causal attention with grouped keys and values, with or without rotary positions."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from mamba_jax.config import AttentionConfig, RopeConfig, need
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, RMSNorm, scaled, scaled_by
from mamba_jax.sharding.axis import TENSOR, axis_index


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
        self.o_proj = Linear(config.num_heads * config.head_dim, hidden_size, bias=config.bias, rngs=rngs, dtype=dtype)
        self.k_scale = nnx.Param(jnp.ones((), jnp.float32)) if config.kv_scales else None
        self.v_scale = nnx.Param(jnp.ones((), jnp.float32)) if config.kv_scales else None

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
        flat = [project(x) for project in (self.q_proj, self.k_proj, self.v_proj)]
        if added is not None:
            flat = [one + more for one, more in zip(flat, added, strict=True)]
        gate, heads = None, (x.shape[0], -1, config.head_dim)
        if config.output_gate:
            both = flat[0].reshape(x.shape[0], -1, 2, config.head_dim)
            flat[0], gate = both[:, :, 0], both[:, :, 1]
        if config.qk_norm is not None and config.qk_norm.all_heads:
            flat[0] = self._norm_all_heads(flat[0], need(self.q_norm), config.num_heads)
            flat[1] = self._norm_all_heads(flat[1], need(self.k_norm), config.num_kv_heads)
        q, k, v = (one.reshape(heads) for one in flat)
        k, v = (self._own_heads(one, q.shape[1]) for one in (k, v))
        if config.qk_norm is not None and not config.qk_norm.all_heads:
            q, k = need(self.q_norm)(q), need(self.k_norm)(k)
        k = scaled(k, config.key_multiplier)
        if config.rope is not None:
            cos, sin = _rotations(layout.positions - first_key, config.rope)
            q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        scales = self._scales(state)
        if scales is not None:  # (q k_scale) (k / k_scale), and v likewise
            q, k, v = scaled_by(q, scales[0]), scaled_by(k, 1 / scales[0]), scaled_by(v, 1 / scales[1])
        out, state = layout.attend(q, k, v, state, scale=config.scale, first_key=first_key)
        if scales is not None:
            out = scaled_by(out, scales[1])
        if gate is not None:
            out = out * jax.nn.sigmoid(gate)
        return scaled(self.o_proj(out.reshape(x.shape[0], -1)), config.output_multiplier), state

    def _scales(self, kv: Array | None) -> tuple[Array, Array] | None:
        """What keys and values are divided by in a cache of 8 bits; None where they are kept as they are."""
        if self.k_scale is None or self.v_scale is None or kv is None or kv.dtype.itemsize > 1:
            return None
        return self.k_scale[...], self.v_scale[...]

    def _norm_all_heads(self, x: Float[Array, "T channels"], norm: RMSNorm, heads: int) -> Float[Array, "T channels"]:
        """The norm of all heads together, which devices that have some of them add up their squares for."""
        whole = heads * self.config.head_dim
        if x.shape[1] == whole:
            return norm(x)
        weight, wide = norm.weight[...], x.astype(jnp.float32)
        mean = lax.psum(jnp.square(wide).sum(-1, keepdims=True), TENSOR) / whole
        factor = weight.astype(jnp.float32) + norm.offset
        return (wide * lax.rsqrt(mean + norm.eps) * factor).astype(weight.dtype)

    def _own_heads(self, kv: Float[Array, "T heads head_dim"], queries: int) -> Float[Array, "T own head_dim"]:
        """Where few of the queries' heads are at hand but all of the keys': the one that these queries share."""
        devices = self.config.num_heads // queries
        if kv.shape[1] * devices <= self.config.num_kv_heads or devices == 1:
            return kv
        index = axis_index() * self.config.num_kv_heads // devices
        return lax.dynamic_slice_in_dim(kv, index, 1, axis=1)


def _rotations(positions: Int[Array, " T"], rope: RopeConfig) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosine and sine of each position's angles, in float32."""
    # Constants, rounded once: a power in float32 would be off by more, times the position.
    powers = rope.theta ** (-np.arange(0, rope.size, 2) / rope.size)
    frequency = np.array(rope.frequencies) if rope.frequencies else powers
    angle = positions.astype(jnp.float32)[:, None] * frequency.astype(np.float32)
    return scaled(jnp.cos(angle), rope.scale), scaled(jnp.sin(angle), rope.scale)


def _rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Turns element i against element i + half; elements past the rotated ones stay as they are."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., start : start + half].astype(jnp.float32) for start in (0, half))
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)
