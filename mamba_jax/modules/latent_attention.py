"""Attention over latents (DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config.latent_attention import LatentAttentionConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, RMSNorm, Weight, normal


class LatentAttention(nnx.Module):
    """softmax(scale * q k^T) v, where all heads' keys and values are projections of one latent.

    Keys and values are never made: q (W_k c) = (W_k^T q) c, so that queries ask for latents, and what attention gives
    is a latent, which W_v takes. A page then holds one entry for each token, whatever the number of heads.

    With the weights divided over devices each has some of the heads, and the latents of all tokens.
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

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: Array | None
    ) -> tuple[Float[Array, "T hidden"], Array | None]:
        config = self.config
        q = self.q_proj(x).reshape(x.shape[0], -1, config.key_size + config.shared_key_size)
        asked = _by_head("thk,hkl->thl", q[..., : config.key_size], self.k_up.weight[...])
        q = jnp.concatenate([asked, q[..., config.key_size :]], axis=-1)
        latent, shared = jnp.split(self.latent_proj(x), [config.latent_size], axis=-1)
        entry = jnp.concatenate([self.norm(latent), shared], axis=-1)[:, None]
        found, state = layout.attend(q, entry, None, state, scale=config.scale)
        # What was weighted of the shared keys is no value.
        out = _by_head("thl,hvl->thv", found[..., : config.latent_size], self.v_up.weight[...])
        return self.o_proj(out.reshape(x.shape[0], -1)), state


def _by_head(axes: str, x: Float[Array, "T heads size"], weight: Float[Array, "heads ..."]) -> Array:
    """A product for each head, summed in float32 and rounded once to x's dtype."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    dot = functools.partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
    return dot(axes, x, weight).astype(x.dtype)
