"""LFM3 (Liquid AI, 2026): gated short convolutions, attention to a window or attention to everything, each before a
SwiGLU MLP. Sublayers also normalise their outputs, and attention has a gate for each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MLP,
    WINDOWED,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    ModelConfigError,
    QKNormConfig,
    need,
)
from mamba_jax.config.short_conv import SHORT_CONV, ShortConvConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.lfm2 import conv_names, mlp_names
from mamba_jax.families.rope import rope_config

_KINDS = {"conv": SHORT_CONV, "sliding_attention": WINDOWED, "full_attention": ATTENTION}
_ROPE_THETA = 1e6
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `Lfm3Config`."""
    fields = Fields({"max_position_embeddings": 128_000, **raw})
    if fields.given("rope_parameters", "rope_scaling") is None:
        fields = Fields({"max_position_embeddings": 128_000, **raw, "rope_parameters": _ROPE})
    fields.only("attention_bias", (False,))
    hidden, eps = fields.integer("hidden_size", 2048), fields.number("norm_eps", 1e-5)
    mixers = _mixers(fields, fields.integer("num_hidden_layers", 24))
    windowed, full = (_attention(fields, hidden, eps, layers) for layers in ("sliding_attention", "full_attention"))
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 128_000),
        hidden_size=hidden,
        pattern="".join(mixer + MLP for mixer in mixers),
        norm_eps=eps,
        attention=full if ATTENTION in mixers else None,
        windowed_attention=windowed if WINDOWED in mixers else None,
        mlp=MLPConfig(fields.integer("intermediate_size", 7680), "silu", gated=True),
        recurrences=(ShortConvConfig(hidden, fields.integer("conv_L_cache", 7), bias=fields.flag("conv_bias", False)),),
        norm_both=fields.flag("use_sandwich_norm", True),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        max_position_embeddings=fields.integer("max_position_embeddings", 0),
        bos_token_id=fields.token("bos_token_id", 124_894),
        eos_token_ids=fields.tokens("eos_token_id", 124_900),
    )


def _mixers(fields: Fields, layers: int) -> str:
    """`layer_types`; without it, every fourth layer from the third on attends to everything, from the fifth to a
    window."""
    found = fields.layers(_KINDS, "layer_types")
    if found is None:
        every_fourth = WINDOWED + SHORT_CONV + ATTENTION + SHORT_CONV
        found = "".join(every_fourth[i % 4] if i else SHORT_CONV for i in range(layers))
    if len(found) != layers:
        raise ModelConfigError(f"config field layer_types has {len(found)} entries, for {layers} layers")
    return found


def _attention(fields: Fields, hidden: int, eps: float, layers: str) -> AttentionConfig:
    heads, head_dim = fields.integer("num_attention_heads", 16), fields.integer("head_dim", 128)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.key_value_heads(heads, 4),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        input_size=hidden,
        rope=rope_config(fields, head_dim, theta=_ROPE_THETA, layers=layers),
        qk_norm=QKNormConfig(eps),
        head_gate=fields.flag("use_attention_gate", True),
        window=fields.integer("sliding_window", 256) if layers == "sliding_attention" else None,
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Lfm3ForCausalLM` has them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    attentions = {ATTENTION: config.attention, WINDOWED: config.windowed_attention}
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.operator_norm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.ffn_norm.weight")
        if config.norm_both:
            body[f"{first}.output_norm.weight"] = tensor(f"{name}.post_operator_norm.weight")
            body[f"{second}.output_norm.weight"] = tensor(f"{name}.post_ffn_norm.weight")
        if config.pattern[i] == SHORT_CONV:
            body |= conv_names(f"{first}.mixer", f"{name}.conv", config)
        else:
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(attentions[config.pattern[i]]))
        body |= mlp_names(f"{second}.mixer", f"{name}.feed_forward")
    return parts.whole_model(
        config,
        body,
        embed="embed_tokens.weight",
        norm="embedding_norm.weight",
        prefixes=("model.", "model.language_model."),
    )


FAMILY = Family(
    name="LFM3",
    model_types=("lfm3",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
