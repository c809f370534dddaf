"""LFM2 (Liquid AI, 2025): gated short convolutions or attention, then a SwiGLU MLP or a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MLP,
    MOE,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
    QKNormConfig,
    need,
)
from mamba_jax.config.short_conv import SHORT_CONV, ShortConvConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_SPARSE = "lfm2_moe"
_ROPE_THETA = 1e6


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `Lfm2Config` or `Lfm2MoeConfig`."""
    fields, sparse = Fields(raw), raw.get("model_type") == _SPARSE
    hidden, eps = fields.integer("hidden_size", 2048 if sparse else 2560), fields.number("norm_eps", 1e-5)
    layers = fields.integer("num_hidden_layers", 32)
    mixers = fields.layers({"conv": SHORT_CONV, "full_attention": ATTENTION}, "layer_types")
    if mixers is None:
        attention_layers = set(fields.integers("full_attn_idxs", list(range(layers))))
        mixers = "".join(ATTENTION if i in attention_layers else SHORT_CONV for i in range(layers))
    if len(mixers) != layers:
        raise ModelConfigError(f"config field layer_types has {len(mixers)} entries, for {layers} layers")
    dense = fields.integer("num_dense_layers", 2) if sparse else layers
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 65536),
        hidden_size=hidden,
        pattern="".join(mixer + (MLP if i < dense else MOE) for i, mixer in enumerate(mixers)),
        norm_eps=eps,
        attention=_attention(fields, hidden, eps),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 7168) if sparse else _adjusted_size(fields), "silu", gated=True
        ),
        moe=_moe(fields) if sparse else None,
        recurrences=(ShortConvConfig(hidden, fields.integer("conv_L_cache", 3), bias=fields.flag("conv_bias", False)),),
        tie_word_embeddings=fields.flag("tie_embedding", True, "tie_word_embeddings"),
        max_position_embeddings=fields.integer("max_position_embeddings", 128_000),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def _attention(fields: Fields, hidden: int, eps: float) -> AttentionConfig:
    heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", hidden // max(heads, 1))
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.key_value_heads(heads, 8),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        input_size=hidden,
        rope=rope_config(fields, head_dim, theta=_ROPE_THETA),
        qk_norm=QKNormConfig(eps),
    )


def _adjusted_size(fields: Fields) -> int:
    """The inner size of MLPs: two thirds of the field, times a factor, rounded up, unless the config disables this."""
    size = fields.integer("block_ff_dim", 12288, "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def _moe(fields: Fields) -> MoEConfig:
    fields.only("use_expert_bias", (True,))
    return MoEConfig(
        num_experts=fields.integer("num_experts", 32),
        experts_per_token=fields.integer("num_experts_per_tok", 4),
        intermediate_size=fields.integer("moe_intermediate_size", 1792),
        activation="silu",
        gated=True,
        router="sigmoid",
        normalize=fields.flag("norm_topk_prob", True),
        scaling=fields.number("routed_scaling_factor", 1.0),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Lfm2ForCausalLM` and `Lfm2MoeForCausalLM` have them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.operator_norm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.ffn_norm.weight")
        if config.pattern[i] == ATTENTION:
            body |= _attention_names(f"{first}.mixer", f"{name}.self_attn")
        else:
            body |= conv_names(f"{first}.mixer", f"{name}.conv", config)
        if config.pattern[i + 1] == MLP:
            body |= mlp_names(f"{second}.mixer", f"{name}.feed_forward")
        else:
            body |= _moe_names(f"{second}.mixer", f"{name}.feed_forward", need(config.moe), config.hidden_size)
    return parts.whole_model(
        config,
        body,
        embed="embed_tokens.weight",
        norm="embedding_norm.weight",
        prefixes=("model.", "model.language_model."),
    )


def _attention_names(path: str, name: str) -> dict[str, HFSource]:
    spelt = {"q_norm": "q_layernorm", "k_norm": "k_layernorm", "o_proj": "out_proj"}
    spelt |= {part: part for part in ("q_proj", "k_proj", "v_proj")}
    return {f"{path}.{ours}.weight": tensor(f"{name}.{theirs}.weight") for ours, theirs in spelt.items()}


def conv_names(path: str, name: str, config: HybridConfig) -> dict[str, HFSource]:
    mixer = config.recurrence(SHORT_CONV)
    assert isinstance(mixer, ShortConvConfig)
    channels = mixer.channels
    sources = {
        f"{path}.in_proj.weight": tensor(f"{name}.in_proj.weight", shape=(3 * channels, config.hidden_size)),
        f"{path}.conv.weight": tensor(f"{name}.conv.weight", shape=(channels, 1, mixer.conv_width)),
        f"{path}.out_proj.weight": tensor(f"{name}.out_proj.weight"),
    }
    if mixer.bias:
        sources[f"{path}.in_proj.bias"] = tensor(f"{name}.in_proj.bias", shape=(3 * channels,))
        sources |= {f"{path}.{part}.bias": tensor(f"{name}.{part}.bias") for part in ("conv", "out_proj")}
    return sources


def mlp_names(path: str, name: str) -> dict[str, HFSource]:
    spelt = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return {f"{path}.{ours}.weight": tensor(f"{name}.{theirs}.weight") for ours, theirs in spelt.items()}


def _moe_names(path: str, name: str, config: MoEConfig, hidden: int) -> dict[str, HFSource]:
    """Experts one by one, or (as transformers' modules have them) in one tensor."""
    sources = {
        f"{path}.router.weight": tensor(f"{name}.gate.weight"),
        f"{path}.router.correction_bias": tensor(f"{name}.expert_bias"),
    }
    return sources | parts.experts(path, name, name, config, hidden)


FAMILY = Family(
    name="LFM2",
    model_types=("lfm2", _SPARSE),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
