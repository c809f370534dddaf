"""Residual sublayers: a norm, a mixer, and the sum with the input."""

from __future__ import annotations

from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import ATTENTION, LATENT, MAMBA, MLP, MOE, PARALLEL, WINDOWED, HybridConfig, need
from mamba_jax.layout import Layout
from mamba_jax.modules.attention import Attention
from mamba_jax.modules.basic import RMSNorm, scaled
from mamba_jax.modules.latent_attention import LatentAttention
from mamba_jax.modules.mamba import Mamba
from mamba_jax.modules.mlp import MLP as MLPModule
from mamba_jax.modules.moe import MoE
from mamba_jax.sharding.across import ShardedModule, across
from mamba_jax.sharding.parameters import mixer_placements
from mamba_jax.store import SlotArrays


class Parallel(nnx.Module):
    """Mamba and attention in parallel on the same input (Falcon-H1); the state is the pair of their states."""

    def __init__(self, config: HybridConfig, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.mamba = Mamba(need(config.mamba), config.hidden_size, rngs=rngs, dtype=dtype)
        self.attention = Attention(need(config.attention), config.hidden_size, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: tuple[SlotArrays | None, Array | None]
    ) -> tuple[Float[Array, "T hidden"], tuple[SlotArrays | None, Array | None]]:
        mamba, slots = self.mamba(x, layout, state[0])
        attention, kv = self.attention(x, layout, state[1])
        return mamba + attention, (slots, kv)


def make_mixer(kind: str, config: HybridConfig, *, index: int, rngs: nnx.Rngs, dtype: DTypeLike) -> nnx.Module:
    """Returns the mixer of a sublayer. `index` counts the model's sublayers of this kind from 0."""
    hidden = config.hidden_size
    if kind == MAMBA:
        return Mamba(need(config.mamba), hidden, rngs=rngs, dtype=dtype)
    if kind == ATTENTION:
        return Attention(need(config.attention), hidden, rngs=rngs, dtype=dtype)
    if kind == WINDOWED:
        return Attention(need(config.windowed_attention), hidden, rngs=rngs, dtype=dtype)
    if kind == LATENT:
        return LatentAttention(need(config.latent_attention), hidden, rngs=rngs, dtype=dtype)
    if kind == MLP:
        return MLPModule(need(config.mlp), hidden, index=index, rngs=rngs, dtype=dtype)
    if kind == MOE:
        return MoE(need(config.moe), hidden, rngs=rngs, dtype=dtype)
    if kind == PARALLEL:
        return Parallel(config, rngs=rngs, dtype=dtype)
    made: nnx.Module = config.recurrence(kind).make(hidden, index=index, rngs=rngs, dtype=dtype)
    return made


def model_norm(config: HybridConfig, *, dtype: DTypeLike) -> RMSNorm:
    """Returns a norm of the model's hidden states."""
    return RMSNorm(config.hidden_size, config.norm_eps, unit_offset=config.norm_unit_offset, dtype=dtype)


class Block(nnx.Module):
    """x + multiplier * mixer(norm(x)), or, with `norm_after`, x + multiplier * norm(mixer(x)).

    With `norm_both`: x + multiplier * output_norm(mixer(norm(x))).

    With a `NormedResidual`: input_multiplier * norm(x) + output_multiplier * mixer(norm(x)).
    """

    def __init__(
        self,
        kind: str,
        config: HybridConfig,
        *,
        index: int = 0,
        norm_after: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ) -> None:
        self.norm = model_norm(config, dtype=dtype)
        self.output_norm = model_norm(config, dtype=dtype) if config.norm_both else None
        self.mixer: Any = make_mixer(kind, config, index=index, rngs=rngs, dtype=dtype)
        self.config, self.kind, self.index, self.norm_after = config, kind, index, norm_after

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: Any, **options: Any
    ) -> tuple[Float[Array, "T hidden"], Any]:
        """Runs the sublayer. `options` are passed to the mixer."""

        def run(modules: Any, layout: Layout, state: Any, x: Array) -> tuple[Array, Any]:
            return modules["mixer"](x, layout, state, **options)

        mixer = ShardedModule(self.mixer, mixer_placements(self.config, self.kind, self.index))
        taken = x if self.norm_after else self.norm(x)
        y, state = across(self.config, {"mixer": mixer}, run, layout, state, taken)
        if (residual := self.config.normed_residual(self.kind)) is not None:
            carried = scaled(taken, residual.input_multiplier) + scaled(y, residual.output_multiplier)
            return carried.astype(x.dtype), state
        y = self.norm(y) if self.norm_after else y
        y = y if self.output_norm is None else self.output_norm(y)
        return x + scaled(y, self.config.residual_multiplier).astype(x.dtype), state
