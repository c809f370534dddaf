"""Falcon-H1 (TII, 2025): Mamba2 and attention in parallel in every layer, then a SwiGLU MLP; multipliers everywhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mamba_jax.config import MLP, PARALLEL, HybridConfig, MLPConfig
from mamba_jax.config.declaration import BothMixers
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, placed
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `FalconH1Config`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    inner = None if fields.explicit_null("mamba_d_ssm") else fields.integer("mamba_d_ssm", 1024)
    times_z, times_x, times_b, times_c, times_dt = fields.numbers("ssm_multipliers", (1.0,) * 5)
    times_gate, times_down = fields.numbers("mlp_multipliers", (1.0, 1.0))
    return HybridConfig(
        **parts.common_fields(fields, vocab=128000, positions=8192, tied=False, bos=1, eos=2),
        family=FAMILY.name,
        hidden_size=hidden,
        pattern="P-" * fields.integer("num_hidden_layers", 32),
        norm_eps=eps,
        mamba=dataclasses.replace(
            parts.mamba_config(fields, hidden, eps, inner_size=inner),
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
            num_heads=32,
            num_kv_heads=8,
            input_multiplier=fields.number("attention_in_multiplier", 1.0),
            key_multiplier=fields.number("key_multiplier", 1.0),
            output_multiplier=fields.number("attention_out_multiplier", 1.0),
        ),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 14336),
            fields.text("hidden_act", "silu"),
            gated=True,
            bias=fields.flag("mlp_bias", False),
            gate_multiplier=times_gate,
            output_multiplier=times_down,
        ),
        embedding_multiplier=fields.number("embedding_multiplier", 1.0),
        logits_multiplier=fields.number("lm_head_multiplier", 1.0),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `FalconH1ForCausalLM` has them. A layer there is two sublayers here."""
    body = parts.layers(
        config, {PARALLEL: ("", _parallel), MLP: ("feed_forward", parts.mlp)}, ("input_layernorm", "pre_ff_layernorm")
    )
    return parts.whole_model(config, body, norm="final_layernorm.weight", prefixes=("model.", "backbone."))


def _parallel(config: BothMixers, hidden: int) -> dict[str, HFSource]:
    both: dict[str, Any] = dict(config.mixers)
    mamba = placed("mamba", parts.mamba(both["mamba"], hidden), "mamba.")
    return mamba | placed("attention", parts.attention(both["attention"], hidden), "self_attn.")


FAMILY = Family("FalconH1", ("falcon_h1",), config_from_hf, weight_names, lambda config: (r".*\.mamba\.mup_vector",))
