"""Falcon-H1 (TII, 2025): Mamba2 and attention in parallel in every layer, then a SwiGLU MLP; multipliers everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mamba_jax.config import HybridConfig, MLPConfig, need
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `FalconH1Config`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    inner = None if fields.explicit_null("mamba_d_ssm") else fields.integer("mamba_d_ssm", 1024)
    times_z, times_x, times_b, times_c, times_dt = fields.numbers("ssm_multipliers", (1.0,) * 5)
    times_gate, times_down = fields.numbers("mlp_multipliers", (1.0, 1.0))
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 128000),
        hidden_size=hidden,
        pattern="P-" * fields.integer("num_hidden_layers", 32),
        norm_eps=eps,
        mamba=dataclasses.replace(
            parts.mamba_config(fields, hidden, eps, inner_size=inner),
            out_bias=fields.flag("projectors_bias", False),
            norm=fields.flag("mamba_rms_norm", False),
            norm_before_gate=fields.flag("mamba_norm_before_gate", True),
            input_multiplier=fields.number("ssm_in_multiplier", 1.0),
            projection_multipliers=(times_z, times_x, times_b, times_c, times_dt),
            output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        ),
        attention=dataclasses.replace(
            parts.attention_config(fields, hidden, num_heads=32, num_kv_heads=8),
            input_multiplier=fields.number("attention_in_multiplier", 1.0),
            key_multiplier=fields.number("key_multiplier", 1.0),
            output_multiplier=fields.number("attention_out_multiplier", 1.0),
        ),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 14336),
            fields.text("hidden_act", "silu"),
            gated=True,
            bias=fields.flag("mlp_bias", False),
            gate_multiplier=times_gate,
            output_multiplier=times_down,
        ),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 8192),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `FalconH1ForCausalLM` has them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i in range(len(config.pattern) // 2):
        name, first, second = f"layers.{i}", f"blocks.{2 * i}", f"blocks.{2 * i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.pre_ff_layernorm.weight")
        body |= parts.mamba(f"{first}.mixer.mamba", f"{name}.mamba", need(config.mamba), config.hidden_size)
        body |= parts.attention(f"{first}.mixer.attention", f"{name}.self_attn", need(config.attention))
        body |= parts.mlp(f"{second}.mixer", f"{name}.feed_forward", gated=True, bias=need(config.mlp).bias)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="final_layernorm.weight", prefixes=("model.", "backbone.")
    )


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    return (*parts.always_ignored(config), r".*\.mamba\.mup_vector")


FAMILY = Family(
    name="FalconH1",
    model_types=("falcon_h1",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=_ignored,
)
