"""Jamba (AI21 Labs, 2024): Mamba-1 or attention without positions, each before an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mamba_jax.config import ATTENTION, MLP, MOE, HybridConfig, MLPConfig, ModelConfigError, MoEConfig
from mamba_jax.config.mamba1 import MAMBA1, Mamba1Config
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `JambaConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("mamba_inner_layernorms", (True,))
    parts.refuse_window(fields)
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-6)
    size, experts = fields.integer("intermediate_size", 14336), fields.integer("num_experts", 16, "num_local_experts")
    attends, routes = _every(fields, "attn_layer", 8, 4), _every(fields, "expert_layer", 2, 1)
    layers = range(fields.integer("num_hidden_layers", 32))
    pattern = "".join(
        (ATTENTION if attends(layer) else MAMBA1) + (MOE if experts > 1 and routes(layer) else MLP) for layer in layers
    )
    return HybridConfig(
        **parts.common_fields(fields, vocab=65536, positions=262144, tied=False, bos=1, eos=2),
        family=FAMILY.name,
        hidden_size=hidden,
        pattern=pattern,
        norm_eps=eps,
        recurrences=(
            Mamba1Config(
                channels=int(fields.number("mamba_expand", 2) * hidden),
                state_size=fields.integer("mamba_d_state", 16),
                dt_rank=parts.dt_rank(fields, "mamba_dt_rank", hidden),
                conv_width=fields.integer("mamba_d_conv", 4),
                conv_bias=fields.flag("mamba_conv_bias", True),
                bias=fields.flag("mamba_proj_bias", False),
                norm_eps=eps,
                norm_weights=True,
            ),
        ),
        attention=parts.attention_config(fields, hidden, num_heads=32, num_kv_heads=8, rope=None),
        mlp=MLPConfig(size, "silu", gated=True),
        moe=MoEConfig(
            num_experts=experts,
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=size,
            activation="silu",
            gated=True,
            router="softmax_all",
        )
        if MOE in pattern
        else None,
    )


def _every(fields: Fields, name: str, default_period: int, default_offset: int) -> Any:
    """Returns a predicate of the layers that `NAME_period` and `NAME_offset` select."""
    period = fields.integer(f"{name}_period", default_period)
    offset = fields.integer(f"{name}_offset", default_offset)
    if not 0 <= offset < period:
        raise ModelConfigError(
            f"config field {name}_offset is {offset}: 0 to {name}_period - 1 = {period - 1} expected"
        )
    return lambda layer: layer % period == offset


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `JambaForCausalLM` has them. A layer there is two sublayers here."""
    mixers: parts.Mixers = {
        MAMBA1: ("mamba", parts.mamba1),
        ATTENTION: ("self_attn", parts.attention),
        MLP: ("feed_forward", parts.mlp),
        MOE: ("feed_forward", partial(parts.moe, router="router")),
    }
    body = parts.layers(config, mixers, ("input_layernorm", "pre_ff_layernorm"))
    return parts.whole_model(config, body, norm="final_layernorm.weight")


FAMILY = Family("Jamba", ("jamba",), config_from_hf, weight_names)
