"""Models of one recurrence and nothing else: Mamba (Gu and Dao, 2023), Falcon-Mamba (Technology Innovation Institute,
2024) and Mamba-2 (Dao and Gu, 2024). Jamba (AI21 Labs, 2024): Mamba-1 or attention without positions, each before an
MLP or a mixture of experts.

Falcon-Mamba also normalizes B, C and what step sizes are projected from, without weights.
"""

from typing import Any

from mamba_jax.config import ATTENTION, MAMBA, MLP, MOE, HybridConfig, MLPConfig, ModelConfigError
from mamba_jax.config.channel_recurrence import MAMBA1, Mamba1Config
from mamba_jax.families import parts
from mamba_jax.families.fields import Fields

_FALCON = "falcon_mamba"


def mamba1_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `MambaConfig` or `FalconMambaConfig`."""
    hidden, eps = fields.integer("hidden_size"), fields.number("layer_norm_epsilon")
    falcon = fields.given("model_type") == _FALCON
    # Falcon-Mamba's config.json has an `expand` that its own width contradicts.
    channels = fields.integer("intermediate_size", int(fields.number("expand", 2) * hidden))
    norm_eps = fields.number("mixer_rms_eps") if falcon else None
    return HybridConfig(
        **parts.common_fields(fields, MAMBA1_FAMILY.name, hidden, eps) | {"max_position_embeddings": None},
        pattern=MAMBA1 * fields.integer("num_hidden_layers"),
        recurrences=(_mamba1_config(fields, hidden, channels, norm_eps=norm_eps),),
        residual_in_fp32=fields.flag("residual_in_fp32", True),
    )


def mamba2_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `Mamba2Config`."""
    hidden, eps = fields.integer("hidden_size"), fields.number("layer_norm_epsilon")
    heads, head_dim, bias = fields.integer("num_heads"), fields.integer("head_dim"), fields.flag("use_bias", False)
    mamba = parts.mamba_config(fields, eps, heads=heads, head_dim=head_dim, bias=bias)
    expand = fields.number("expand", 2)
    if mamba.inner_size != expand * hidden:
        raise ModelConfigError(
            f"{mamba.num_heads} heads of {mamba.head_dim} do not make expand * hidden_size = {expand:g} * {hidden}"
        )
    return HybridConfig(
        **parts.common_fields(fields, MAMBA2_FAMILY.name, hidden, eps) | {"max_position_embeddings": None},
        pattern=MAMBA * fields.integer("num_hidden_layers"),
        mamba=mamba,
        residual_in_fp32=fields.flag("residual_in_fp32", True),
    )


def _mamba1_config(fields: Fields, hidden: int, channels: int, **options: Any) -> Mamba1Config:
    """Reads a Mamba-1 mixer. Without a rank of step sizes, or with "auto", it is a sixteenth of the hidden size."""
    automatic = fields.given("mamba_dt_rank", "time_step_rank") in (None, "auto")
    return Mamba1Config(
        channels=channels,
        state_size=fields.integer("mamba_d_state", 16, "state_size"),
        dt_rank=-(-hidden // 16) if automatic else fields.integer("mamba_dt_rank", 0, "time_step_rank"),
        conv_width=fields.integer("mamba_d_conv", 4, "conv_kernel"),
        conv_bias=fields.flag("mamba_conv_bias", True, "use_conv_bias"),
        bias=fields.flag("mamba_proj_bias", False, "use_bias"),
        **options,
    )


def jamba_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `JambaConfig`."""
    fields.only("mamba_inner_layernorms", (True,))
    parts.refuse_window(fields)
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    experts = fields.integer("num_experts", None, "num_local_experts")
    attends, routes = _every(fields, "attn_layer"), _every(fields, "expert_layer")
    layers, channels = range(fields.integer("num_hidden_layers")), int(fields.number("mamba_expand", 2) * hidden)
    pattern = "".join(
        (ATTENTION if attends(layer) else MAMBA1) + (MOE if experts > 1 and routes(layer) else MLP) for layer in layers
    )
    return HybridConfig(
        **parts.common_fields(fields, JAMBA_FAMILY.name, hidden, eps),
        pattern=pattern,
        recurrences=(_mamba1_config(fields, hidden, channels, norm_eps=eps, norm_weights=True),),
        attention=parts.attention_config(fields, hidden, rope=None),
        mlp=MLPConfig(fields.integer("intermediate_size")),
        moe=parts.moe_config(fields, size_field="intermediate_size", router="softmax_all") if MOE in pattern else None,
    )


def _every(fields: Fields, name: str) -> Any:
    """Returns a predicate of the layers that `NAME_period` and `NAME_offset` select."""
    period, offset = fields.integer(f"{name}_period"), fields.integer(f"{name}_offset")
    if not 0 <= offset < period:
        raise ModelConfigError(
            f"config field {name}_offset is {offset}: 0 to {name}_period - 1 = {period - 1} expected"
        )
    return lambda layer: layer % period == offset


MAMBA1_FAMILY = parts.family("Mamba", ("mamba", _FALCON), mamba1_from_hf)
MAMBA2_FAMILY = parts.family("Mamba2", ("mamba2",), mamba2_from_hf)
JAMBA_FAMILY = parts.family("Jamba", ("jamba",), jamba_from_hf)
