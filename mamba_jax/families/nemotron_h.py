"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): one mixer per layer, attention without positions, relu^2 MLPs, experts
behind a sigmoid router (on latent copies in the larger ones), and a multi-token-prediction layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MAMBA,
    MLP,
    MOE,
    AttentionConfig,
    HybridConfig,
    MambaConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
    need,
)
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields

_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
}


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `NemotronHConfig`, or of NVIDIA's own older one.

    Step sizes are not limited, whatever `time_step_limit` or `time_step_min` say: the models were trained without.
    """
    fields = Fields(raw)
    fields.only("mamba_hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("layer_norm_epsilon", 1e-5, "rms_norm_eps")
    if (window := fields.integer("sliding_window", 0)) and window < fields.integer("max_position_embeddings", 4096):
        raise ModelConfigError(f"config field sliding_window is {window}: only attention to everything is supported")
    pattern = fields.layers(_KINDS, "layers_block_type", "layer_types")
    if pattern is None:
        pattern = fields.text("hybrid_override_pattern", "ME*-")
    mtp_pattern = fields.layers(_KINDS, "mtp_layers_block_type", "mtp_layer_types")
    if mtp_pattern is None or mtp_pattern == "*E":
        mtp_pattern = fields.text("mtp_hybrid_override_pattern", "*E")
    if fields.integer("num_nextn_predict_layers", 0) != 1:
        mtp_pattern = ""
    proj_bias, head_dim = fields.flag("use_bias", False), fields.integer("head_dim", 128, "attention_head_dim")
    activation, bias = fields.text("mlp_hidden_act", "relu2"), fields.flag("mlp_bias", False)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 131072),
        hidden_size=hidden,
        pattern=pattern,
        norm_eps=eps,
        mamba=MambaConfig(
            num_heads=fields.integer("mamba_num_heads", 128),
            head_dim=fields.integer("mamba_head_dim", 64),
            state_size=fields.integer("ssm_state_size", 128),
            num_groups=fields.integer("n_groups", 8, "mamba_n_groups"),
            conv_width=fields.integer("conv_kernel", 4, "mamba_d_conv"),
            conv_bias=fields.flag("use_conv_bias", True, "mamba_conv_bias"),
            in_bias=proj_bias,
            out_bias=proj_bias,
            norm_eps=eps,
        ),
        attention=AttentionConfig(
            num_heads=(heads := fields.integer("num_attention_heads", 32)),
            num_kv_heads=fields.key_value_heads(heads, 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            input_size=hidden,
        ),
        mlp=MLPConfig(_intermediate_size(fields), activation, gated=False, bias=bias),
        moe=MoEConfig(
            num_experts=fields.integer("n_routed_experts", 8, "num_local_experts"),
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("moe_intermediate_size", 7688),
            activation=activation,
            gated=False,
            router="sigmoid",
            num_groups=fields.integer("n_group", 1),
            top_groups=fields.integer("topk_group", 1),
            normalize=fields.flag("norm_topk_prob", True),
            scaling=fields.number("routed_scaling_factor", 1.0),
            latent_size=fields.integer("moe_latent_size", 0) or None,
            shared_size=fields.integer("moe_shared_expert_intermediate_size", 7688),
            bias=bias,
        )
        if MOE in pattern + mtp_pattern
        else None,
        residual_in_fp32=fields.flag("residual_in_fp32", False),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 4096),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
        mtp_pattern=mtp_pattern,
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `NemotronHForCausalLM` has them; `mtp.*` as NVIDIA's checkpoints have it."""
    body: dict[str, HFSource] = {}
    for i, kind in enumerate(config.pattern):
        body |= _block(kind, f"blocks.{i}", f"layers.{i}", config)
    sources = parts.whole_model(
        config,
        body,
        embed="embeddings.weight",
        norm="norm_f.weight",
        prefixes=("backbone.", "model.", "model.language_model."),
    )
    return sources | _mtp(config)


def _mtp(config: HybridConfig) -> dict[str, HFSource]:
    if not config.mtp_pattern:
        return {}
    sources = parts.draft_layer_frame(config)
    for i, kind in enumerate(config.mtp_pattern):
        sources |= _block(kind, f"mtp.blocks.{i}", f"mtp.layers.{i}", config)
    return sources


def _block(kind: str, path: str, name: str, config: HybridConfig) -> dict[str, HFSource]:
    sources = {f"{path}.norm.weight": tensor(f"{name}.norm.weight")}
    path, name = f"{path}.mixer", f"{name}.mixer"
    if kind == MAMBA:
        return sources | parts.mamba(path, name, need(config.mamba), config.hidden_size)
    if kind == ATTENTION:
        return sources | parts.attention(path, name, need(config.attention))
    if kind == MLP:
        return sources | parts.mlp(path, name, gated=False, bias=need(config.mlp).bias)
    return sources | _moe(path, name, need(config.moe))


def _moe(path: str, name: str, config: MoEConfig) -> dict[str, HFSource]:
    sources = {
        f"{path}.router.weight": tensor(f"{name}.gate.weight"),
        f"{path}.router.correction_bias": tensor(f"{name}.gate.e_score_correction_bias"),
    }
    for part in ("up", "down"):
        names = tuple(f"{name}.experts.{e}.{part}_proj.weight" for e in range(config.num_experts))
        stacked = tensor(f"{name}.experts.{part}_proj")
        sources[f"{path}.experts.{part}"] = HFSource(names, stack=True, alternatives=(stacked,))
    if config.latent_size:
        sources |= parts.linear(f"{path}.latent_in", f"{name}.fc1_latent_proj", bias=config.bias)
        sources |= parts.linear(f"{path}.latent_out", f"{name}.fc2_latent_proj", bias=config.bias)
    return sources | parts.mlp(f"{path}.shared", f"{name}.shared_experts", gated=False, bias=config.bias)


def _intermediate_size(fields: Fields) -> int | tuple[int, ...]:
    """One number, or in pruned models one for each MLP."""
    if isinstance(fields.given("intermediate_size"), list):
        return tuple(fields.integers("intermediate_size", []))
    return fields.integer("intermediate_size", 21504)


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    return parts.always_ignored(config) + (() if config.mtp_pattern else (r"mtp\..*",))


FAMILY = Family(
    name="NemotronH",
    model_types=("nemotron_h",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=_ignored,
)
