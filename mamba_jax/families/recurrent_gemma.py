"""RecurrentGemma (Google DeepMind, 2024): two recurrent blocks of Griffin to one attention to a window, each before an
MLP."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import ml_dtypes

from mamba_jax.config import ATTENTION, MLP, AttentionConfig, HybridConfig, MLPConfig, need
from mamba_jax.config.rg_lru import RG_LRU, RGLRUConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_KINDS = {"recurrent": RG_LRU, "attention": ATTENTION}


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `RecurrentGemmaConfig`."""
    fields = Fields(raw)
    fields.only("attention_bias", (False,))
    hidden, heads = fields.integer("hidden_size", 2560), fields.integer("num_attention_heads", 10)
    blocks = fields.layers(_KINDS, "block_types", "_block_types") or "RR*"
    layers = fields.integer("num_hidden_layers", 26)
    mixers = (blocks * layers)[:layers]
    activation = fields.text("hidden_activation", "gelu_pytorch_tanh")
    head_dim = hidden // max(heads, 1)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 256000),
        hidden_size=hidden,
        pattern="".join(mixer + MLP for mixer in mixers),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.key_value_heads(heads, None),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            input_size=hidden,
            output_bias=True,
            rope=rope_config(fields, head_dim, share=fields.number("partial_rotary_factor", 0.5)),
            window=fields.integer("attention_window_size", 2048, "sliding_window"),
        ),
        # The field counts both halves of the gated layer.
        mlp=MLPConfig(fields.integer("intermediate_size", 7680) // 2, activation, gated=True, bias=True),
        recurrences=(
            RGLRUConfig(
                channels=fields.integer("lru_width", hidden),
                num_heads=heads,
                conv_width=fields.integer("conv1d_width", 4),
                activation=activation,
            ),
        ),
        norm_unit_offset=True,
        # Rounded as the makers' code does.
        embedding_multiplier=float(ml_dtypes.bfloat16(math.sqrt(hidden))),
        logits_soft_cap=fields.number("logits_soft_cap", 30.0),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        max_position_embeddings=fields.integer("max_position_embeddings", 0) or None,
        bos_token_id=fields.token("bos_token_id", 2),
        eos_token_ids=fields.tokens("eos_token_id", 1),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `RecurrentGemmaForCausalLM` has them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.temporal_pre_norm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.channel_pre_norm.weight")
        if config.pattern[i] == ATTENTION:
            body |= parts.attention(f"{first}.mixer", f"{name}.temporal_block", need(config.attention))
        else:
            body |= _recurrent_names(f"{first}.mixer", f"{name}.temporal_block", config)
        body |= parts.mlp(f"{second}.mixer", f"{name}.mlp_block", gated=True, bias=True)
    return parts.whole_model(config, body, embed="embed_tokens.weight", norm="final_norm.weight", prefixes=("model.",))


def _recurrent_names(path: str, name: str, config: HybridConfig) -> dict[str, HFSource]:
    mixer = config.recurrence(RG_LRU)
    assert isinstance(mixer, RGLRUConfig)
    sources: dict[str, HFSource] = {}
    for ours, theirs in (("x_proj", "linear_x"), ("y_proj", "linear_y"), ("out_proj", "linear_out")):
        sources |= parts.linear(f"{path}.{ours}", f"{name}.{theirs}", bias=True)
    convolution = (mixer.channels, 1, mixer.conv_width)
    sources[f"{path}.conv.weight"] = tensor(f"{name}.conv_1d.weight", shape=convolution)
    sources[f"{path}.conv.bias"] = tensor(f"{name}.conv_1d.bias")
    for gate in ("input_gate", "recurrent_gate"):
        sources[f"{path}.{gate}.weight"] = tensor(f"{name}.rg_lru.{gate}_weight")
        sources[f"{path}.{gate}_bias"] = tensor(f"{name}.rg_lru.{gate}_bias")
    sources[f"{path}.recurrent_param"] = tensor(f"{name}.rg_lru.recurrent_param")
    return sources


FAMILY = Family(
    name="RecurrentGemma",
    model_types=("recurrent_gemma",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
