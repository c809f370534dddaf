"""Families with Bamba's fields of a Mamba2 mixer.

Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba2 or attention with half-rotated heads, then a SwiGLU MLP. Granite 4
hybrid (IBM, 2025): Mamba2 or attention, then experts and an MLP that all tokens share; multipliers on embedding,
residuals, attention scores and logits. Falcon-H1 (TII, 2025): Mamba2 and attention in parallel in every layer, then a
SwiGLU MLP; multipliers everywhere.
"""

import dataclasses
from typing import Any

from mamba_jax.config import (
    MAMBA,
    MLP,
    MOE,
    PARALLEL,
    HybridConfig,
    MambaConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
)
from mamba_jax.config.declaration import BothMixers
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource, placed, tensor, with_prefix
from mamba_jax.families.fields import Fields


def mamba_config(fields: Fields, hidden: int, eps: float, *, inner_size: int | None = None) -> MambaConfig:
    """Reads a Mamba2 mixer. The inner width is `inner_size` or expand * hidden."""
    heads, bias = fields.integer("mamba_n_heads"), fields.flag("mamba_proj_bias", False)
    inner = int(fields.number("mamba_expand", 2) * hidden) if inner_size is None else inner_size
    automatic = fields.given("mamba_d_head") in (None, "auto")
    head_dim = inner // heads if automatic else fields.integer("mamba_d_head", 0)
    if heads * head_dim != inner:
        raise ModelConfigError(f"{heads} Mamba heads of {head_dim} do not make the inner width {inner}")
    return parts.mamba_config(fields, eps, heads=heads, head_dim=head_dim, bias=bias)


def bamba_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `BambaConfig`."""
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    attention_layers = set(fields.integers("attn_layer_indices", []))
    layers = ("*-" if i in attention_layers else "M-" for i in range(fields.integer("num_hidden_layers")))
    return HybridConfig(
        **parts.common_fields(fields, BAMBA.name, hidden, eps),
        pattern="".join(layers),
        mamba=mamba_config(fields, hidden, eps),
        attention=parts.attention_config(fields, hidden, rope={"share": 0.5}),
        mlp=parts.mlp_config(fields),
    )


def granite_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `GraniteMoeHybridConfig`."""
    fields.only("position_embedding_type", ("rope", "nope"))
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    mixers = fields.layers(parts.MAMBA_KINDS, "layer_types", "layers_block_type")
    if mixers is None:
        mixers = MAMBA * fields.integer("num_hidden_layers")
    experts, shared = fields.integer("num_local_experts"), fields.integer("shared_intermediate_size")
    activation = fields.text("hidden_act", "silu")
    return HybridConfig(
        **parts.common_fields(fields, GRANITE.name, hidden, eps),
        pattern="".join(mixer + (MOE if experts else MLP) for mixer in mixers),
        mamba=mamba_config(fields, hidden, eps),
        attention=parts.attention_config(
            fields,
            hidden,
            rope={} if fields.text("position_embedding_type") == "rope" else None,
            scale=fields.number("attention_multiplier", 1.0),
        ),
        mlp=None if experts else MLPConfig(shared, activation),
        moe=parts.moe_config(
            fields, size_field="intermediate_size", router="softmax", activation=activation, shared_size=shared
        )
        if experts
        else None,
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        residual_multiplier=fields.number("residual_multiplier", 1.0),
        logits_multiplier=1.0 / fields.number("logits_scaling", 1.0),
    )


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
    gate_up = parts.consecutive("input_linear", {"gate_proj": size, "up_proj": size}, hidden)
    return gate_up | parts.weights({"down_proj": "output_linear"})


def falcon_h1_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `FalconH1Config`."""
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    inner = None if fields.explicit_null("mamba_d_ssm") else fields.integer("mamba_d_ssm")
    times_z, times_x, times_b, times_c, times_dt = fields.numbers("ssm_multipliers", (1.0,) * 5)
    times_gate, times_down = fields.numbers("mlp_multipliers", (1.0, 1.0))
    return HybridConfig(
        **parts.common_fields(fields, FALCON_H1.name, hidden, eps),
        pattern="P-" * fields.integer("num_hidden_layers"),
        mamba=dataclasses.replace(
            mamba_config(fields, hidden, eps, inner_size=inner),
            out_bias=fields.flag("projectors_bias", False),
            norm=fields.flag("mamba_rms_norm", False),
            norm_before_gate=fields.flag("mamba_norm_before_gate", True),
            input_multiplier=fields.number("ssm_in_multiplier", 1.0),
            projection_multipliers=(times_z, times_x, times_b, times_c, times_dt),
            output_multiplier=fields.number("ssm_out_multiplier", 1.0),
        ),
        attention=parts.attention_config(
            fields,
            hidden,
            input_multiplier=fields.number("attention_in_multiplier", 1.0),
            key_multiplier=fields.number("key_multiplier", 1.0),
            output_multiplier=fields.number("attention_out_multiplier", 1.0),
        ),
        mlp=parts.mlp_config(fields, gate_multiplier=times_gate, output_multiplier=times_down),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )


def _parallel(config: BothMixers, hidden: int) -> dict[str, HFSource]:
    both: dict[str, Any] = dict(config.mixers)
    mamba = placed("mamba", parts.mamba(both["mamba"], hidden), "mamba.")
    return mamba | placed("attention", parts.attention(both["attention"], hidden), "self_attn.")


def _only_mlp(config: MLPConfig, hidden: int) -> dict[str, HFSource]:
    return _shared_mlp(config.size(0), hidden)


BAMBA = parts.family("Bamba", ("bamba",), bamba_from_hf)
GRANITE = parts.family("GraniteMoeHybrid", ("granitemoehybrid",), granite_from_hf, {MLP: _only_mlp, MOE: _experts})
FALCON_H1 = parts.family(
    "FalconH1", ("falcon_h1",), falcon_h1_from_hf, {PARALLEL: _parallel}, lambda config: (r".*\.mamba\.mup_vector",)
)
