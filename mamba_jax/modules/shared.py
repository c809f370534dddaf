"""Zamba2's shared transformer blocks and the sublayers that use them (Glorioso et al., "The Zamba2 Suite", 2024)."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from mamba_jax.config import HybridConfig, need
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import Linear, LowRank, RMSNorm
from mamba_jax.modules.feed_forward import MLP
from mamba_jax.modules.linear_recurrence import Mamba
from mamba_jax.sharding.across import ShardedModule, across, project_whole, run_mixer
from mamba_jax.sharding.parameters import adapter_placements
from mamba_jax.store import SlotArrays


class Adapters(nnx.Module):
    """The additions of one use of a shared block to the block's own projections."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        shared, attention, mlp = need(config.shared), need(config.attention), need(config.mlp)
        rank = shared.adapter_rank
        self.gate_up = LowRank(config.hidden_size, rank, (2, mlp.size(0)), rngs=rngs, dtype=dtype)

        def adapter(heads: int) -> LowRank | None:
            if not shared.attention_adapters:
                return None
            return LowRank(attention.input_size, rank, heads * attention.head_dim, rngs=rngs, dtype=dtype)

        self.q, self.k, self.v = map(adapter, (attention.num_heads, *[attention.num_kv_heads] * 2))


class SharedBlock(nnx.Module):
    """Attention and MLP over the concatenated hidden state and token embedding, without residual connections."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        attention = need(config.attention)
        self.config = config
        self.attention_norm = RMSNorm(attention.input_size, config.norm_eps, dtype=dtype)
        self.attention = Attention(attention, config.hidden_size, rngs=rngs, dtype=dtype)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.mlp = MLP(need(config.mlp), config.hidden_size, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Hidden, embedded: Hidden, layout: Layout, kv: Array | None, adapters: Adapters
    ) -> tuple[Hidden, Array | None]:
        y = self.attention_norm(jnp.concatenate([x, embedded], axis=-1))
        config, attention, mlp = self.config, need(self.config.attention), need(self.config.mlp)
        added = ShardedModule(adapters, adapter_placements(need(config.shared), attention, mlp))
        modules = {"attention": ShardedModule(self.attention, attention.parameters()), "adapters": added}
        y, kv = across(config, modules, _attend, layout, kv, y)
        modules = {"mlp": ShardedModule(self.mlp, mlp.parameters()), "adapters": added}
        y, _ = across(config, modules, _feed, layout, None, self.mlp_norm(y))
        return y, kv


def _attend(modules: Any, layout: Layout, kv: Any, y: Array) -> tuple[Array, Any]:
    adapters = modules["adapters"]
    each = () if adapters.q is None else (adapters.q, adapters.k, adapters.v)
    return modules["attention"](y, layout, kv, added=tuple(one(y, layout.adapter) for one in each) or None)


def _feed(modules: Any, layout: Layout, state: None, y: Array) -> tuple[Array, None]:
    return modules["mlp"](y, layout, None, added=modules["adapters"].gate_up(y, layout.adapter))


class SharedUse(nnx.Module):
    """A Mamba sublayer whose input includes the output of a shared block: x + mamba(norm(x + linear(block(x))))."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, dtype=dtype)
        self.mixer = Mamba(need(config.mamba), config.hidden_size, rngs=rngs, dtype=dtype)
        self.linear = Linear(config.hidden_size, config.hidden_size, rngs=rngs, dtype=dtype)
        self.adapters = Adapters(config, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Hidden,
        layout: Layout,
        state: tuple[SlotArrays | None, Array | None],
        *,
        block: SharedBlock,
        embedded: Hidden,
    ) -> tuple[Hidden, tuple[SlotArrays | None, Array | None]]:
        slots, kv = state
        added, kv = block(x, embedded, layout, kv, self.adapters)
        added = project_whole(self.config, self.linear, layout, added)
        read = self.norm(x + added.astype(x.dtype))
        y, slots = run_mixer(self.config, self.mixer, need(self.config.mamba).parameters(), layout, slots, read)
        return x + y.astype(x.dtype), (slots, kv)
