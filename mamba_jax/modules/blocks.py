"""Residual sublayers: a norm, a mixer, and the sum with the input."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from kernels_pallas.fixed_order import rounded
from mamba_jax.config import (
    AttentionConfig,
    HybridConfig,
    LatentAttentionConfig,
    MambaConfig,
    MixerConfig,
    MLPConfig,
    MoEConfig,
)
from mamba_jax.config.channel_recurrence import Mamba1Config, RGLRUConfig, ShortConvConfig
from mamba_jax.config.declaration import BothMixers
from mamba_jax.config.linear_recurrence import DeltaConfig, LightningConfig
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.attention import Attention, LatentAttention
from mamba_jax.modules.basic import RMSNorm, scaled
from mamba_jax.modules.conv import ShortConv
from mamba_jax.modules.feed_forward import MLP, MoE
from mamba_jax.modules.linear_recurrence import Delta, Lightning, Mamba
from mamba_jax.modules.selective import RGLRU, Mamba1
from mamba_jax.sharding.across import run_mixer
from mamba_jax.sharding.parameters import mixer_placements
from mamba_jax.store import SlotArrays


class Parallel(nnx.Module):
    """Mamba and attention in parallel on the same input (Falcon-H1); the state is the pair of their states."""

    def __init__(self, config: BothMixers, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        both: dict[str, Any] = dict(config.mixers)
        self.mamba = Mamba(both["mamba"], hidden_size, rngs=rngs, dtype=dtype)
        self.attention = Attention(both["attention"], hidden_size, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Hidden, layout: Layout, state: tuple[SlotArrays | None, Array | None]
    ) -> tuple[Hidden, tuple[SlotArrays | None, Array | None]]:
        mamba, slots = self.mamba(x, layout, state[0])
        attention, kv = self.attention(x, layout, state[1])
        return mamba + attention, (slots, kv)


MIXERS: dict[type[MixerConfig], Callable[..., nnx.Module]] = {
    AttentionConfig: Attention,
    BothMixers: Parallel,
    DeltaConfig: Delta,
    LatentAttentionConfig: LatentAttention,
    LightningConfig: Lightning,
    MLPConfig: MLP,
    Mamba1Config: Mamba1,
    MambaConfig: Mamba,
    MoEConfig: MoE,
    RGLRUConfig: RGLRU,
    ShortConvConfig: ShortConv,
}
"""The module of each mixer's configuration, to which a recurrence from outside of this package adds its own.

It takes (config, hidden_size, rngs, dtype). Called with (x [T, hidden], layout, state), it returns (y [T, hidden],
state): a dict of the declared arrays by name, or None for whole sequences. On several devices, weights and states are
the device's own pieces, and y is a partial sum. Parameters that do not come from `modules.basic.initial` have values
also in `HybridModel.abstract`.
"""


def model_norm(config: HybridConfig, *, dtype: DTypeLike) -> RMSNorm:
    """Returns a norm of the model's hidden states."""
    return RMSNorm(config.hidden_size, config.norm_eps, unit_offset=config.norm_unit_offset, dtype=dtype)


class Block(nnx.Module):
    """x + multiplier * mixer(norm(x)), or, with `norm_after`, x + multiplier * norm(mixer(x)).

    With `norm_both`: x + multiplier * output_norm(mixer(norm(x))).

    With a `NormedResidual`: input_multiplier * norm(x) + output_multiplier * mixer(norm(x)).
    """

    def __init__(self, config: HybridConfig, place: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        """`place`: in the model's pattern, which the sublayers of its multi-token-prediction layer follow."""
        pattern = config.pattern + config.mtp_pattern
        self.config, self.kind, self.norm_after = config, pattern[place], place in config.norm_after
        self.index = pattern[:place].count(self.kind)
        mixer = config.mixer(self.kind).at(self.index)
        self.norm = model_norm(config, dtype=dtype)
        self.output_norm = model_norm(config, dtype=dtype) if config.norm_both else None
        self.mixer: Any = MIXERS[type(mixer)](mixer, config.hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: Any, **options: Any) -> tuple[Hidden, Any]:
        """Runs the sublayer. `options` are passed to the mixer."""
        parameters = mixer_placements(self.config, self.kind, self.index)
        taken = x if self.norm_after else self.norm(x)
        y, state = run_mixer(self.config, self.mixer, parameters, layout, state, taken, **options)
        if (residual := self.config.normed_residual(self.kind)) is not None:
            carried = scaled(taken, residual.input_multiplier) + scaled(y, residual.output_multiplier)
            return carried.astype(x.dtype), state
        y = rounded(self.norm(y)) if self.norm_after else y
        y = y if self.output_norm is None else rounded(self.output_norm(y))
        return x + scaled(y, self.config.residual_multiplier).astype(x.dtype), state
