"""Attention over latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import product_by_head, sigmoid
from mamba_jax.config.latent_attention import LatentAttentionConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, RMSNorm, Weight, normal
from mamba_jax.modules.rotary import rotate, rotations


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
        self.q_proj = Linear(hidden_size, heads * head_dim, rngs=rngs, dtype=dtype)
        self.latent_proj = Linear(hidden_size, config.entry_size, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(latent, config.norm_eps, dtype=dtype)
        self.k_up = Weight(normal(rngs, (heads, config.key_size, latent), dtype))
        self.v_up = Weight(normal(rngs, (heads, config.value_size, latent), dtype))
        self.o_proj = Linear(heads * config.value_size, hidden_size, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, heads, rngs=rngs, dtype=dtype) if config.head_gate else None

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: Array | None, *, first_key: int = 0
    ) -> tuple[Float[Array, "T hidden"], Array | None]:
        """With `first_key` the sequence begins there, as in `Attention`."""
        config = self.config
        q = self.q_proj(x, layout.adapter).reshape(x.shape[0], -1, config.key_size + config.shared_key_size)
        asked = product_by_head(q[..., : config.key_size], self.k_up.weight[...].swapaxes(1, 2))
        shared_q = q[..., config.key_size :]
        latent, shared = jnp.split(self.latent_proj(x, layout.adapter)[:, None], [config.latent_size], axis=-1)
        if config.rope is not None:
            cos, sin = rotations(layout.positions - first_key, config.rope)
            shared_q, shared = (rotate(_by_halves(part), cos, sin) for part in (shared_q, shared))
        q = jnp.concatenate([asked, shared_q], axis=-1)
        entry = jnp.concatenate([self.norm(latent), shared], axis=-1)
        found, state = layout.attend(q, entry, None, state, scale=config.scale, first_key=first_key)
        # The weighted sum of the shared keys is not a value.
        out = product_by_head(found[..., : config.latent_size], self.v_up.weight[...])
        if self.gate_proj is not None:
            out *= sigmoid(self.gate_proj(x, layout.adapter, out_dtype=jnp.float32)).astype(out.dtype)[..., None]
        return self.o_proj(out.reshape(x.shape[0], -1), layout.adapter), state


def _by_halves(x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
    """Moves the even elements before the odd ones, so that the pairs 2i and 2i + 1 are `rotate`'s pairs."""
    return jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
