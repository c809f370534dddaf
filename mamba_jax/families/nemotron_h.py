"""Nemotron-H and Nemotron 3 (NVIDIA, 2025): one mixer per layer, attention without positions, relu^2 MLPs, experts
behind a sigmoid router (on latent copies in the larger ones), and a multi-token-prediction layer."""

from mamba_jax.config import MLP, MOE, HybridConfig, MLPConfig, ModelConfigError
from mamba_jax.families import mtp, parts
from mamba_jax.families.fields import Fields

_KINDS = {**parts.MAMBA_KINDS, "mlp": MLP, "moe": MOE}


def config_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `NemotronHConfig`, or of NVIDIA's own older one.

    Step sizes are not limited, whatever `time_step_limit` or `time_step_min` say: the models were trained without.
    """
    hidden, eps = fields.integer("hidden_size"), fields.number("layer_norm_epsilon", None, "rms_norm_eps")
    if (window := fields.integer("sliding_window", 0)) and window < fields.integer("max_position_embeddings"):
        raise ModelConfigError(f"config field sliding_window is {window}: only attention to everything is supported")
    pattern = fields.layers(_KINDS, "layers_block_type", "layer_types")
    if pattern is None:
        pattern = fields.text("hybrid_override_pattern")
    mtp_pattern = fields.layers(_KINDS, "mtp_layers_block_type", "mtp_layer_types")
    if mtp_pattern is None or mtp_pattern == "*E":
        mtp_pattern = fields.text("mtp_hybrid_override_pattern")
    if fields.integer("num_nextn_predict_layers", 0) != 1:
        mtp_pattern = ""
    head_dim = fields.integer("attention_head_dim")
    activation, bias = fields.text("mlp_hidden_act"), fields.flag("mlp_bias", False)
    return HybridConfig(
        **parts.common_fields(fields, FAMILY.name, hidden, eps, silu="mamba_hidden_act"),
        pattern=pattern,
        mamba=parts.mamba_config(
            fields,
            eps,
            heads=fields.integer("mamba_num_heads"),
            head_dim=fields.integer("mamba_head_dim"),
            bias=fields.flag("use_bias", False),
            limited=False,
        ),
        attention=parts.attention_config(fields, hidden, head_dim=head_dim, rope=None, bias=False),
        mlp=MLPConfig(_intermediate_size(fields), activation, gated=False, bias=bias),
        moe=parts.moe_config(
            fields,
            activation=activation,
            gated=False,
            latent_size=fields.integer("moe_latent_size", 0) or None,
            shared_size=fields.integer("moe_shared_expert_intermediate_size"),
            bias=bias,
        )
        if MOE in pattern + mtp_pattern
        else None,
        residual_in_fp32=fields.flag("residual_in_fp32", False),
        mtp_pattern=mtp_pattern,
    )


def _intermediate_size(fields: Fields) -> int | tuple[int, ...]:
    """One number, or in pruned models one for each MLP."""
    if isinstance(fields.given("intermediate_size"), list):
        return tuple(fields.integers("intermediate_size", []))
    return fields.integer("intermediate_size")


FAMILY = parts.family("NemotronH", ("nemotron_h",), config_from_hf, ignored=mtp.unused)
