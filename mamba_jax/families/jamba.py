"""Jamba (AI21 Labs, 2024): Mamba-1 or attention without positions, each before an MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MLP, MOE, HybridConfig, MLPConfig, ModelConfigError, MoEConfig, need
from mamba_jax.config.mamba1 import MAMBA1, Mamba1Config
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `JambaConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("mamba_inner_layernorms", (True,))
    if (window := fields.given("sliding_window")) is not None:
        raise ModelConfigError(f"config field sliding_window is {window!r}: only attention to everything is supported")
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-6)
    size, experts = fields.integer("intermediate_size", 14336), fields.integer("num_experts", 16, "num_local_experts")
    attends, routes = _every(fields, "attn_layer", 8, 4), _every(fields, "expert_layer", 2, 1)
    layers = range(fields.integer("num_hidden_layers", 32))
    pattern = "".join(
        (ATTENTION if attends(layer) else MAMBA1) + (MOE if experts > 1 and routes(layer) else MLP) for layer in layers
    )
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 65536),
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
        attention=parts.attention_config(fields, hidden, num_heads=32, num_kv_heads=8, rope=False),
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
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 262144),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
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
    body: dict[str, HFSource] = {}
    (mamba,) = config.recurrences
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.pre_ff_layernorm.weight")
        if config.pattern[i] == ATTENTION:
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
        else:
            body |= parts.mamba1(f"{first}.mixer", f"{name}.mamba", mamba, config.hidden_size)  # type: ignore[arg-type]
        path, stored = f"{second}.mixer", f"{name}.feed_forward"
        if config.pattern[i + 1] == MLP:
            body |= parts.mlp(path, stored, gated=True, bias=False)
        else:
            body[f"{path}.router.weight"] = tensor(f"{stored}.router.weight")
            spelt = ("gate_proj", "up_proj", "down_proj")
            body |= parts.experts(path, stored, stored, need(config.moe), config.hidden_size, names=spelt)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="final_layernorm.weight", prefixes=("model.",)
    )


FAMILY = Family(
    name="Jamba",
    model_types=("jamba",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
