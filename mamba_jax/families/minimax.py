"""MiniMax-Text-01 and M1 (MiniMax, 2025): lightning attention or softmax attention, each before a mixture of experts.

A sublayer adds what its mixer gives to the normalised input, not to the input as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MOE,
    AttentionConfig,
    HybridConfig,
    ModelConfigError,
    MoEConfig,
    NormedResidual,
    need,
)
from mamba_jax.config.lightning import LIGHTNING, LightningConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_LIGHTNING_NORM_EPS = 1e-6  # independent of the config's value for other norms
_ROPE_THETA = 1e6


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `MiniMaxConfig`, or of MiniMax's own."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("postnorm", (True,))
    fields.only("shared_intermediate_size", (0,))
    if (window := fields.given("sliding_window")) is not None:
        raise ModelConfigError(f"config field sliding_window is {window!r}: only attention to everything is supported")
    hidden, layers = fields.integer("hidden_size", 4096), fields.integer("num_hidden_layers", 32)
    heads = fields.integer("num_attention_heads", 32)
    head_dim = fields.integer("head_dim", hidden // max(heads, 1))
    mixers = _mixers(fields, layers)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 32000),
        hidden_size=hidden,
        pattern="".join(mixer + MOE for mixer in mixers),
        norm_eps=fields.number("rms_norm_eps", 1e-5),
        attention=AttentionConfig(
            num_heads=heads,
            num_kv_heads=fields.key_value_heads(heads, 8),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            input_size=hidden,
            # MiniMax's own code rotates part of each head; transformers knows no such field.
            rope=rope_config(fields, fields.integer("rotary_dim", head_dim), theta=_ROPE_THETA),
        ),
        moe=MoEConfig(
            num_experts=fields.integer("num_local_experts", 8, "num_experts"),
            experts_per_token=fields.integer("num_experts_per_tok", 2),
            intermediate_size=fields.integer("intermediate_size", 14336),
            activation="silu",
            gated=True,
            router="softmax",
        ),
        recurrences=(LightningConfig(heads, head_dim, _LIGHTNING_NORM_EPS, _decay_factors(mixers)),),
        normed_residuals=(
            _residual(fields, LIGHTNING, "linear_attn", "linear_attention"),
            _residual(fields, ATTENTION, "full_attn", "full_attention"),
            _residual(fields, MOE, "mlp", "mlp"),
        ),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 131072),
        bos_token_id=fields.token("bos_token_id", 1),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def _mixers(fields: Fields, layers: int) -> str:
    """`layer_types`, or MiniMax's list of 0 (lightning) and 1 (softmax); every other layer without either."""
    found = fields.layers({"linear_attention": LIGHTNING, "full_attention": ATTENTION}, "layer_types")
    if found is None:
        kinds = fields.integers("attn_type_list", [(i + 1) % 2 for i in range(layers)])
        if not set(kinds) <= {0, 1}:
            raise ModelConfigError(f"config field attn_type_list is {kinds}: only 0 and 1 are supported")
        found = "".join(ATTENTION if kind else LIGHTNING for kind in kinds)
    if len(found) != layers:
        raise ModelConfigError(f"config field layer_types has {len(found)} entries, for {layers} layers")
    return found


def _decay_factors(mixers: str) -> tuple[float, ...]:
    """Decays slow down from layer to layer: by a factor from 1 down to 1e-5."""
    last = len(mixers) - 1 + 1e-5
    return tuple(1 - layer / last + 1e-5 for layer, mixer in enumerate(mixers) if mixer == LIGHTNING)


def _residual(fields: Fields, kind: str, name: str, published: str) -> NormedResidual:
    return NormedResidual(
        kind,
        fields.number(f"{name}_alpha_factor", 1.0, f"layernorm_{published}_alpha"),
        fields.number(f"{name}_beta_factor", 1.0, f"layernorm_{published}_beta"),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Names as MiniMax's checkpoints and as transformers' modules have them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    moe = need(config.moe)
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.post_attention_layernorm.weight")
        if config.pattern[i] == ATTENTION:
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
        else:
            spelt = {"qkv_proj": "qkv_proj", "gate_proj": "output_gate", "norm": "norm", "out_proj": "out_proj"}
            body |= {f"{first}.mixer.{a}.weight": tensor(f"{name}.self_attn.{b}.weight") for a, b in spelt.items()}
        published, module = f"{name}.block_sparse_moe", f"{name}.mlp"
        body[f"{second}.mixer.router.weight"] = tensor(f"{published}.gate.weight", f"{module}.gate.weight")
        body |= parts.experts(f"{second}.mixer", published, module, moe, config.hidden_size)
    return parts.whole_model(config, body, embed="embed_tokens.weight", norm="norm.weight", prefixes=("model.",))


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """transformers also saves what it computes from the decay rates."""
    decays = r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)"
    return (*parts.always_ignored(config), decays)


FAMILY = Family(
    name="MiniMax",
    model_types=("minimax", "minimax_text_01", "minimax_m1"),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=_ignored,
)
