"""LFM2 (Liquid AI, 2025): gated short convolutions or attention, then a SwiGLU MLP or a mixture of experts.

LFM3 (2026) has attention to a window, too. Its sublayers also normalize their outputs, and its attention has a gate for
each head.
"""

from mamba_jax.config import ATTENTION, MLP, MOE, WINDOWED, AttentionConfig, HybridConfig, MLPConfig, QKNormConfig
from mamba_jax.config.channel_recurrence import SHORT_CONV, ShortConvConfig
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource
from mamba_jax.families.fields import Fields

_SPARSE = "lfm2_moe"
_KINDS = {"conv": SHORT_CONV, "sliding_attention": WINDOWED, "full_attention": ATTENTION}
_LFM3_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
}


def lfm2_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `Lfm2Config` or `Lfm2MoeConfig`."""
    sparse = fields.given("model_type") == _SPARSE
    hidden, eps = fields.integer("hidden_size", 2048 if sparse else 2560), fields.number("norm_eps")
    if sparse:
        fields.only("use_expert_bias", (True,))
    layers = fields.integer("num_hidden_layers")
    kinds = {name: kind for name, kind in _KINDS.items() if kind != WINDOWED}
    mixers = fields.layers(kinds, "layer_types", count=layers)
    if mixers is None:
        attention_layers = set(fields.integers("full_attn_idxs", list(range(layers))))
        mixers = "".join(ATTENTION if i in attention_layers else SHORT_CONV for i in range(layers))
    dense = fields.integer("num_dense_layers") if sparse else layers
    size = fields.integer("intermediate_size") if sparse else _adjusted_size(fields)
    return HybridConfig(
        **parts.common_fields(fields, LFM2_FAMILY.name, hidden, eps, silu=None)
        | {"tie_word_embeddings": fields.flag("tie_embedding", True, "tie_word_embeddings")},
        pattern="".join(mixer + (MLP if i < dense else MOE) for i, mixer in enumerate(mixers)),
        attention=parts.attention_config(fields, hidden, bias=False, qk_norm=QKNormConfig(eps)),
        mlp=MLPConfig(size),
        moe=parts.moe_config(fields) if sparse else None,
        recurrences=(ShortConvConfig(hidden, fields.integer("conv_L_cache"), bias=fields.flag("conv_bias", False)),),
    )


def _adjusted_size(fields: Fields) -> int:
    """The inner size of MLPs: two thirds of the field, times a factor, rounded up, unless the config disables this."""
    size = fields.integer("block_ff_dim", None, "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return size
    size = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return -(-size // multiple) * multiple


def lfm3_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `Lfm3Config`.

    Without `layer_types`, every fourth layer from the third on attends to everything, from the fifth on to a window.
    """
    if fields.given("rope_parameters", "rope_scaling") is None:
        fields = Fields.of({**fields.raw, "rope_parameters": _LFM3_ROPE}, LFM3_FAMILY.name)
    fields.only("attention_bias", (False,))
    hidden, eps = fields.integer("hidden_size"), fields.number("norm_eps")
    layers = fields.integer("num_hidden_layers")
    every_fourth = WINDOWED + SHORT_CONV + ATTENTION + SHORT_CONV
    default = "".join(every_fourth[i % 4] if i else SHORT_CONV for i in range(layers))
    mixers = fields.layers(_KINDS, "layer_types", count=layers) or default

    def attention(kind: str, window: int | None) -> AttentionConfig:
        return parts.attention_config(
            fields,
            hidden,
            rope={"layers": kind},
            qk_norm=QKNormConfig(eps),
            head_gate=fields.flag("use_attention_gate"),
            window=window,
        )

    windowed = attention("sliding_attention", fields.integer("sliding_window"))
    return HybridConfig(
        **parts.common_fields(fields, LFM3_FAMILY.name, hidden, eps, silu=None),
        pattern="".join(mixer + MLP for mixer in mixers),
        attention=attention("full_attention", None) if ATTENTION in mixers else None,
        windowed_attention=windowed if WINDOWED in mixers else None,
        mlp=MLPConfig(fields.integer("intermediate_size")),
        recurrences=(ShortConvConfig(hidden, fields.integer("conv_L_cache"), bias=fields.flag("conv_bias", False)),),
        norm_both=fields.flag("use_sandwich_norm"),
    )


def _conv(config: ShortConvConfig, hidden: int) -> dict[str, HFSource]:
    channels = config.channels
    shapes = {"in_proj.weight": (3 * channels, hidden), "conv.weight": (channels, 1, config.conv_width)}
    return parts.named(config.parameters(), shapes={**shapes, "in_proj.bias": (3 * channels,)})


LFM2_FAMILY = parts.family("LFM2", ("lfm2", _SPARSE), lfm2_from_hf, {SHORT_CONV: _conv})
LFM3_FAMILY = parts.family("LFM3", ("lfm3",), lfm3_from_hf, {SHORT_CONV: _conv})
