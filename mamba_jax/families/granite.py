"""Granite 4 hybrid (IBM, 2025): Mamba2 or attention, then experts and an MLP that all tokens share; multipliers on
embedding, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MAMBA, MLP, MOE, HybridConfig, MLPConfig, MoEConfig, need
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields

_KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION}


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `GraniteMoeHybridConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-6)
    fields.only("position_embedding_type", ("rope", "nope"))
    mixers = fields.layers(_KINDS, "layer_types", "layers_block_type")
    if mixers is None:
        mixers = MAMBA * fields.integer("num_hidden_layers", 32)
    experts, shared = fields.integer("num_local_experts", 8), fields.integer("shared_intermediate_size", 1024)
    activation = fields.text("hidden_act", "silu")
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        pattern="".join(mixer + (MOE if experts else MLP) for mixer in mixers),
        norm_eps=eps,
        mamba=parts.mamba_config(fields, hidden, eps),
        attention=parts.attention_config(
            fields,
            hidden,
            num_heads=32,
            num_kv_heads=None,
            scale=fields.number("attention_multiplier", 1.0),
            rope=fields.text("position_embedding_type", "nope") == "rope",
        ),
        mlp=None if experts else MLPConfig(shared, activation, gated=True),
        moe=MoEConfig(
            num_experts=experts,
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size", 11008),
            activation=activation,
            gated=True,
            router="softmax",
            shared_size=shared,
        )
        if experts
        else None,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `GraniteMoeHybridForCausalLM` has them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i, kind in enumerate(config.pattern[::2]):
        name, first, second = f"layers.{i}", f"blocks.{2 * i}", f"blocks.{2 * i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.post_attention_layernorm.weight")
        if kind == MAMBA:
            body |= parts.mamba(f"{first}.mixer", f"{name}.mamba", need(config.mamba), config.hidden_size)
        else:
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
        if config.moe:
            body |= _experts(f"{second}.mixer", f"{name}.block_sparse_moe", config.moe, config.hidden_size)
            if config.moe.shared_size:
                body |= _shared_mlp(f"{second}.mixer.shared", f"{name}.shared_mlp", config.moe.shared_size, config)
        else:
            body |= _shared_mlp(f"{second}.mixer", f"{name}.shared_mlp", need(config.mlp).size(0), config)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="norm.weight", prefixes=("model.", "backbone.")
    )


def _experts(path: str, name: str, config: MoEConfig, hidden: int) -> dict[str, HFSource]:
    """Returns the sources; the second spellings are those of transformers 5's modules."""
    stored = (config.num_experts, 2 * config.intermediate_size, hidden)
    return {
        f"{path}.router.weight": tensor(f"{name}.router.layer.weight", f"{name}.router.weight"),
        f"{path}.experts.up": tensor(f"{name}.input_linear.weight", f"{name}.experts.gate_up_proj", shape=stored),
        f"{path}.experts.down": tensor(f"{name}.output_linear.weight", f"{name}.experts.down_proj"),
    }


def _shared_mlp(path: str, name: str, size: int, config: HybridConfig) -> dict[str, HFSource]:
    return parts.fused_gate_up(path, f"{name}.input_linear", size, config.hidden_size) | parts.linear(
        f"{path}.down_proj", f"{name}.output_linear"
    )


FAMILY = Family(
    name="GraniteMoeHybrid",
    model_types=("granitemoehybrid",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
