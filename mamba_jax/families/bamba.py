"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba2 or attention with half-rotated heads, then a SwiGLU MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import HybridConfig, MLPConfig, need
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `BambaConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    attention = parts.attention_config(fields, hidden, num_heads=32, num_kv_heads=8, rope_share=0.5)
    attention_layers = set(fields.integers("attn_layer_indices", []))
    layers = ("*-" if i in attention_layers else "M-" for i in range(fields.integer("num_hidden_layers", 32)))
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 128000),
        hidden_size=hidden,
        pattern="".join(layers),
        norm_eps=eps,
        mamba=parts.mamba_config(fields, hidden, eps),
        attention=attention,
        mlp=MLPConfig(
            fields.integer("intermediate_size", 14336),
            fields.text("hidden_act", "silu"),
            gated=True,
            bias=fields.flag("mlp_bias", False),
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 262144),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `BambaForCausalLM` has them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i, kind in enumerate(config.pattern[::2]):
        name, first, second = f"layers.{i}", f"blocks.{2 * i}", f"blocks.{2 * i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.pre_ff_layernorm.weight")
        if kind == "M":
            body |= parts.mamba(f"{first}.mixer", f"{name}.mamba", need(config.mamba), config.hidden_size)
        else:
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
        body |= parts.mlp(f"{second}.mixer", f"{name}.feed_forward", gated=True, bias=need(config.mlp).bias)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="final_layernorm.weight", prefixes=("model.", "backbone.")
    )


FAMILY = Family(
    name="Bamba",
    model_types=("bamba",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
