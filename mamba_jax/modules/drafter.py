"""The parts that all drafters have."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import DrafterConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, RMSNorm, Table, initial, normal


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


def feed(modules: Any, layout: Layout, state: None, x: Array) -> tuple[Array, None]:
    """Runs an MLP (`mixer`) on one device; see `across`."""
    return modules["mixer"](x, layout, None)
