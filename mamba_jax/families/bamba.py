"""Bamba (IBM, Princeton, CMU and UIUC, 2024): Mamba2 or attention with half-rotated heads, then a SwiGLU MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MAMBA, MLP, HybridConfig, MLPConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `BambaConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("rms_norm_eps", 1e-5)
    attention_layers = set(fields.integers("attn_layer_indices", []))
    layers = ("*-" if i in attention_layers else "M-" for i in range(fields.integer("num_hidden_layers", 32)))
    return HybridConfig(
        **parts.common_fields(fields, vocab=128000, positions=262144, tied=False, bos=1, eos=2),
        family=FAMILY.name,
        hidden_size=hidden,
        pattern="".join(layers),
        norm_eps=eps,
        mamba=parts.mamba_config(fields, hidden, eps),
        attention=parts.attention_config(fields, hidden, num_heads=32, num_kv_heads=8, rope={"share": 0.5}),
        mlp=MLPConfig(
            fields.integer("intermediate_size", 14336),
            fields.text("hidden_act", "silu"),
            gated=True,
            bias=fields.flag("mlp_bias", False),
        ),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `BambaForCausalLM` has them. A layer there is two sublayers here."""
    mixers: parts.Mixers = {
        MAMBA: ("mamba", parts.mamba),
        ATTENTION: ("self_attn", parts.attention),
        MLP: ("feed_forward", parts.mlp),
    }
    body = parts.layers(config, mixers, ("input_layernorm", "pre_ff_layernorm"))
    return parts.whole_model(config, body, norm="final_layernorm.weight", prefixes=("model.", "backbone."))


FAMILY = Family("Bamba", ("bamba",), config_from_hf, weight_names)
