"""Granite 4 hybrid (IBM, 2025): Mamba2 or attention, then experts and an MLP that all tokens share; multipliers on
embedding, residuals, attention scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MAMBA, MLP, MOE, HybridConfig, MLPConfig, MoEConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, placed, tensor, with_prefix
from mamba_jax.families.fields import Fields

_KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION}


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `GraniteMoeHybridConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("position_embedding_type", ("rope", "nope"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-6)
    mixers = fields.layers(_KINDS, "layer_types", "layers_block_type")
    if mixers is None:
        mixers = MAMBA * fields.integer("num_hidden_layers", 32)
    experts, shared = fields.integer("num_local_experts", 8), fields.integer("shared_intermediate_size", 1024)
    activation = fields.text("hidden_act", "silu")
    return HybridConfig(
        **parts.common_fields(fields, vocab=32000, positions=2048, tied=False, bos=1, eos=2),
        family=FAMILY.name,
        hidden_size=hidden,
        pattern="".join(mixer + (MOE if experts else MLP) for mixer in mixers),
        norm_eps=eps,
        mamba=parts.mamba_config(fields, hidden, eps),
        attention=parts.attention_config(
            fields,
            hidden,
            num_heads=32,
            num_kv_heads=None,
            rope={} if fields.text("position_embedding_type", "nope") == "rope" else None,
            scale=fields.number("attention_multiplier", 1.0),
        ),
        mlp=None if experts else MLPConfig(shared, activation, gated=True),
        moe=None
        if not experts
        else MoEConfig(
            num_experts=experts,
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size", 11008),
            activation=activation,
            gated=True,
            router="softmax",
            shared_size=shared,
        ),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `GraniteMoeHybridForCausalLM` has them. A layer there is two sublayers here."""
    mixers: parts.Mixers = {
        MAMBA: ("mamba", parts.mamba),
        ATTENTION: ("self_attn", parts.attention),
        MLP: ("shared_mlp", lambda mlp, hidden: _shared_mlp(mlp.size(0), hidden)),
        MOE: ("", _experts),
    }
    return parts.whole_model(config, parts.layers(config, mixers), prefixes=("model.", "backbone."))


def _experts(config: MoEConfig, hidden: int) -> dict[str, HFSource]:
    """Returns the sources; the second spellings are those of transformers 5's modules."""
    stored = (config.num_experts, 2 * config.intermediate_size, hidden)
    experts = {
        "router.weight": tensor("router.layer.weight", "router.weight"),
        "experts.up": tensor("input_linear.weight", "experts.gate_up_proj", shape=stored),
        "experts.down": tensor("output_linear.weight", "experts.down_proj"),
    }
    shared = placed("shared", _shared_mlp(config.shared_size, hidden), "shared_mlp.") if config.shared_size else {}
    return with_prefix(experts, "block_sparse_moe.") | shared


def _shared_mlp(size: int, hidden: int) -> dict[str, HFSource]:
    return parts.fused_gate_up("input_linear", size, hidden) | parts.weights({"down_proj": "output_linear"})


FAMILY = Family("GraniteMoeHybrid", ("granitemoehybrid",), config_from_hf, weight_names)
