"""Causal attention with grouped keys and values, or over latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1), with
or without rotary positions (Su et al., "RoFormer", 2021).
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.fixed_order import product_by_head, rounded, sigmoid
from mamba_jax.config import AttentionConfig, RopeConfig, need
from mamba_jax.config.attention import LatentAttentionConfig
from mamba_jax.layout import Hidden, Layout, Span
from mamba_jax.modules.basic import Linear, RMSNorm, Weight, constant, normal, scaled, scaled_by
from mamba_jax.sharding.axis import axis_index


def rotations(positions: Int[Array, " T"], rope: RopeConfig) -> tuple[Float[Array, "T half"], Float[Array, "T half"]]:
    """Cosine and sine of each position's angles, in float32."""
    # Constants, rounded once: a power in float32 would be off by more, times the position.
    powers = rope.theta ** (-np.arange(0, rope.size, 2) / rope.size)
    frequency = np.array(rope.frequencies) if rope.frequencies else powers
    angle = rounded(positions.astype(jnp.float32)[:, None] * frequency.astype(np.float32))
    return scaled(jnp.cos(angle), rope.scale), scaled(jnp.sin(angle), rope.scale)


def rotate(
    x: Float[Array, "T heads head_dim"], cos: Float[Array, "T half"], sin: Float[Array, "T half"]
) -> Float[Array, "T heads head_dim"]:
    """Rotates the pair of elements i and i + half, for each i below half. Elements after them stay as they are."""
    half = cos.shape[1]
    cos, sin = cos[:, None], sin[:, None]
    first, second = (x[..., start : start + half].astype(jnp.float32) for start in (0, half))
    turned = [
        rounded(first * cos) - rounded(second * sin),
        rounded(second * cos) + rounded(first * sin),
    ]
    return jnp.concatenate([*(part.astype(x.dtype) for part in turned), x[..., 2 * half :]], axis=-1)


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
    ) -> tuple[Hidden, Array | None]:
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
        out, state = layout.attend(q, k, v, state, Span(config.scale, first_key, config.window))
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


class LatentAttention(nnx.Module):
    """softmax(scale * q k^T) v, where all heads' keys and values are projections of one latent.

    Keys and values are never computed: q (W_k c) = (W_k^T q) c, so queries attend to latents. The output of attention
    is a latent, to which W_v is applied. A page then holds one entry for each token, for any number of heads.

    If the weights are divided over devices, each device has some of the heads, and the latents of all tokens.
    """

    def __init__(self, config: LatentAttentionConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        heads, latent = config.num_heads, config.latent_size
        head_dim = config.key_size + config.shared_key_size
        queries = config.query_latent_size
        self.q_latent_proj = Linear(hidden_size, queries, rngs=rngs, dtype=dtype) if queries else None
        self.q_norm = RMSNorm(queries, config.norm_eps, dtype=dtype) if queries else None
        self.q_proj = Linear(queries or hidden_size, heads * head_dim, rngs=rngs, dtype=dtype)
        self.latent_proj = Linear(hidden_size, config.entry_size, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(latent, config.norm_eps, dtype=dtype)
        self.k_up = Weight(normal(rngs, (heads, config.key_size, latent), dtype))
        self.v_up = Weight(normal(rngs, (heads, config.value_size, latent), dtype))
        self.o_proj = Linear(heads * config.value_size, hidden_size, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, heads, rngs=rngs, dtype=dtype) if config.head_gate else None

    def __call__(
        self, x: Hidden, layout: Layout, state: Array | None, *, first_key: int = 0
    ) -> tuple[Hidden, Array | None]:
        """With `first_key` the sequence begins there, as in `Attention`."""
        config = self.config
        read = x
        if self.q_latent_proj is not None:
            read = need(self.q_norm)(self.q_latent_proj(x, layout.adapter))
        q = self.q_proj(read, layout.adapter).reshape(x.shape[0], -1, config.key_size + config.shared_key_size)
        asked = product_by_head(q[..., : config.key_size], self.k_up.weight[...].swapaxes(1, 2))
        shared_q = q[..., config.key_size :]
        latent, shared = jnp.split(self.latent_proj(x, layout.adapter)[:, None], [config.latent_size], axis=-1)
        if config.rope is not None:
            cos, sin = rotations(layout.positions - first_key, config.rope)
            shared_q, shared = (rotate(_by_halves(part), cos, sin) for part in (shared_q, shared))
        q = jnp.concatenate([asked, shared_q], axis=-1)
        entry = jnp.concatenate([self.norm(latent), shared], axis=-1)
        found, state = layout.attend(q, entry, None, state, Span(config.scale, first_key))
        # The weighted sum of the shared keys is not a value.
        out = product_by_head(found[..., : config.latent_size], self.v_up.weight[...])
        if self.gate_proj is not None:
            out *= sigmoid(self.gate_proj(x, layout.adapter, out_dtype=jnp.float32)).astype(out.dtype)[..., None]
        return self.o_proj(out.reshape(x.shape[0], -1), layout.adapter), state


def _by_halves(x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """Moves the even elements before the odd ones, so that the pairs 2i and 2i + 1 are `rotate`'s pairs."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
