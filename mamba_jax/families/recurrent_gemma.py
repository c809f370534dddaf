"""RecurrentGemma (Google DeepMind, 2024): two recurrent blocks of Griffin to one attention to a window, each before an
MLP."""

import math

import ml_dtypes

from mamba_jax.config import ATTENTION, MLP, HybridConfig, MLPConfig
from mamba_jax.config.channel_recurrence import RG_LRU, RGLRUConfig
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource
from mamba_jax.families.fields import Fields

_KINDS = {"recurrent": RG_LRU, "attention": ATTENTION}


def config_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `RecurrentGemmaConfig`."""
    fields.only("attention_bias", (False,))
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    heads, layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    blocks = fields.layers(_KINDS, "block_types", "_block_types") or "RR*"
    mixers = (blocks * layers)[:layers]
    activation = fields.text("hidden_activation")
    return HybridConfig(
        **parts.common_fields(fields, FAMILY.name, hidden, eps, silu=None),
        pattern="".join(mixer + MLP for mixer in mixers),
        attention=parts.attention_config(
            fields,
            hidden,
            rope={"share": fields.number("partial_rotary_factor")},
            output_bias=True,
            window=fields.integer("attention_window_size", None, "sliding_window"),
        ),
        # The field counts both halves of the gated layer.
        mlp=MLPConfig(fields.integer("intermediate_size") // 2, activation, gated=True, bias=True),
        recurrences=(
            RGLRUConfig(
                channels=fields.integer("lru_width", hidden),
                num_heads=heads,
                conv_width=fields.integer("conv1d_width"),
                activation=activation,
            ),
        ),
        norm_unit_offset=True,
        # Rounded as the makers' code does.
        embedding_multiplier=float(ml_dtypes.bfloat16(math.sqrt(hidden))),
        logits_soft_cap=fields.number("logits_soft_cap"),
    )


def _rg_lru(config: RGLRUConfig, hidden: int) -> dict[str, HFSource]:
    spelt = {"x_proj": "linear_x", "y_proj": "linear_y", "out_proj": "linear_out", "conv": "conv_1d"}
    spelt["recurrent_param"] = "rg_lru.recurrent_param"
    for gate in ("input_gate", "recurrent_gate"):
        spelt |= {f"{gate}.weight": f"rg_lru.{gate}_weight", f"{gate}_bias": f"rg_lru.{gate}_bias"}
    return parts.named(config.parameters(), spelt, {"conv.weight": (config.channels, 1, config.conv_width)})


FAMILY = parts.family("RecurrentGemma", ("recurrent_gemma",), config_from_hf, {RG_LRU: _rg_lru})
