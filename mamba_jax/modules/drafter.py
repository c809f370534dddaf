"""The parts that all drafters have: a frame around their layers, and the layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import DrafterConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import Linear, RMSNorm, Table, initial, normal
from mamba_jax.modules.mlp import MLP
from mamba_jax.sharding.across import ShardedModule, across


class DrafterFrame(nnx.Module):
    """The parts of a drafter around its layers: the projection of the target's hidden states, tables and final norm."""

    def __init__(self, config: DrafterConfig, target: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        size = config.hidden_size
        self.target, self.places = target, config.places
        self.fc = Linear(len(config.places) * target.hidden_size, size, rngs=rngs, dtype=dtype)
        self.final_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        embed, head = (target.vocab_size, size), (config.vocab_size, size)
        self.embed = Table(normal(rngs, embed, dtype)) if config.own_embedding else None
        self.lm_head = Table(normal(rngs, head, dtype)) if config.own_head else None
        self.tokens = nnx.Param(_tokens(config.vocab_size)) if config.maps_vocabulary else None


def _tokens(count: int) -> Array:
    return initial((count,), jnp.int32, lambda: jnp.arange(count))


class DrafterLayer(nnx.Module):
    """A pre-norm transformer layer. With `pairs`, it reads pairs of an embedding and a hidden state."""

    def __init__(
        self, config: DrafterConfig, target: HybridConfig, *, pairs: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        size = config.hidden_size
        self.config, self.target = config, target
        attention = replace(config.attention, input_size=2 * size) if pairs else config.attention
        self.attention_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.hidden_norm = RMSNorm(size, config.norm_eps, dtype=dtype) if pairs else None
        self.attention = Attention(attention, size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(size, config.norm_eps, dtype=dtype)
        self.mlp = MLP(config.mlp, size, rngs=rngs, dtype=dtype)

    def run(
        self, x: Float[Array, "T hidden"], read: Float[Array, "T inputs"], layout: Any, kv: Array | None, first_key: int
    ) -> tuple[Float[Array, "T hidden"], Array | None]:
        """Returns the hidden states, and the keys and values of this layer.

        Args:
            x: what the sublayers add to.
            read: what attention reads.
            first_key: see `Attention`.
        """

        def attend(modules: Any, layout: Any, state: Any, read: Array) -> tuple[Array, Any]:
            y, kv = modules["mixer"](read, layout, None if state is None else state["draft_kv"], first_key=first_key)
            return y, None if state is None else {"draft_kv": kv}

        state = None if kv is None else {"draft_kv": kv}
        y, state = across(self.target, {"mixer": self.sharded_attention}, attend, layout, state, read)
        x = x + y.astype(x.dtype)
        mlp = ShardedModule(self.mlp, self.config.mlp.parameters())
        y, _ = across(self.target, {"mixer": mlp}, _feed, layout, None, self.mlp_norm(x))
        return x + y.astype(x.dtype), None if state is None else state["draft_kv"]

    @property
    def sharded_attention(self) -> ShardedModule:
        """The attention, as `across` takes it."""
        return ShardedModule(self.attention, self.config.attention.parameters())


def _feed(modules: Any, layout: Layout, state: None, x: Array) -> tuple[Array, None]:
    return modules["mixer"](x, layout, None)
