"""OLMo Hybrid (Ai2, 2025): three gated delta nets to one attention normalised after, each before an MLP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MLP,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    ModelConfigError,
    QKNormConfig,
    need,
)
from mamba_jax.config.delta import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_NORM_EPS = 1e-5  # of the gated norm; the config sets only that of the other norms


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `OlmoHybridConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 3840), fields.number("rms_norm_eps", 1e-6)
    layers, heads = fields.integer("num_hidden_layers", 32), fields.integer("num_attention_heads", 30)
    mixers = fields.layers({"linear_attention": DELTA, "full_attention": ATTENTION}, "layer_types")
    if mixers is None:
        mixers = "".join(ATTENTION if i % 4 == 3 else DELTA for i in range(layers))
        mixers = mixers if ATTENTION in mixers else mixers[:-1] + ATTENTION
    if len(mixers) != layers:
        raise ModelConfigError(f"config field layer_types has {len(mixers)} entries, for {layers} layers")
    pattern = "".join(mixer + MLP for mixer in mixers)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 100352),
        hidden_size=hidden,
        pattern=pattern,
        norm_eps=eps,
        # Both sublayers of a layer with attention.
        norm_after=tuple(i for i in range(len(pattern)) if pattern[i - i % 2] == ATTENTION),
        attention=_attention(fields, hidden, heads, eps),
        mlp=MLPConfig(fields.integer("intermediate_size", 11008), "silu", gated=True),
        recurrences=(_delta(fields, hidden, heads),),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 65536),
        bos_token_id=None if fields.given("bos_token_id") is None else fields.integer("bos_token_id", 0),
        eos_token_ids=fields.tokens("eos_token_id", 100257),
    )


def _attention(fields: Fields, hidden: int, heads: int, eps: float) -> AttentionConfig:
    head_dim = fields.integer("head_dim", hidden // max(heads, 1))
    rope = fields.given("rope_parameters", "rope_scaling")
    # Published without positions: rope_parameters is null, or has no theta.
    rotates = isinstance(rope, Mapping) and rope.get("rope_theta") is not None
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.key_value_heads(heads, None),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        input_size=hidden,
        bias=fields.flag("attention_bias", False),
        rope=rope_config(fields, head_dim) if rotates else None,
        qk_norm=QKNormConfig(eps, all_heads=True),
    )


def _delta(fields: Fields, hidden: int, heads: int) -> DeltaConfig:
    groups = fields.integer("linear_num_key_heads", heads)
    keys = fields.integer("linear_key_head_dim", int(0.75 * hidden / max(groups, 1)))
    return DeltaConfig(
        num_heads=fields.integer("linear_num_value_heads", heads),
        head_dim=fields.integer("linear_value_head_dim", 2 * keys),
        state_size=keys,
        num_groups=groups,
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        norm_eps=_NORM_EPS,
        beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0,
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Names as Ai2's checkpoints have them, and as transformers' modules do. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        if config.pattern[i] == ATTENTION:
            # The second spelling is what transformers saves.
            spelt = f"{name}.post_attention_layernorm.weight", f"{name}.feedforward_layer_norm.weight"
            body[f"{first}.norm.weight"] = tensor(*spelt)
            body[f"{second}.norm.weight"] = tensor(f"{name}.post_feedforward_layernorm.weight")
            body |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
        else:
            spelt = f"{name}.attention_layer_norm.weight", f"{name}.input_layernorm.weight"
            body[f"{first}.norm.weight"] = tensor(*spelt)
            spelt = f"{name}.feedforward_layer_norm.weight", f"{name}.post_attention_layernorm.weight"
            body[f"{second}.norm.weight"] = tensor(*spelt)
            delta = config.recurrence(DELTA)
            assert isinstance(delta, DeltaConfig)
            body |= _delta_names(f"{first}.mixer", f"{name}.linear_attn", delta)
        body |= parts.mlp(f"{second}.mixer", f"{name}.mlp", gated=True, bias=False)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="norm.weight", prefixes=("model.", "model.language_model.")
    )


def _delta_names(path: str, name: str, config: DeltaConfig) -> dict[str, HFSource]:
    keys, inner, width = config.key_size, config.inner_size, config.conv_width
    spelt = {part: part for part in ("q_proj", "k_proj", "v_proj", "a_proj", "b_proj")}
    spelt |= {"z_proj": "g_proj", "out_proj": "o_proj", "norm": "o_norm"}
    sources = {f"{path}.{ours}.weight": tensor(f"{name}.{theirs}.weight") for ours, theirs in spelt.items()}
    channels = 2 * keys + inner

    def conv(rows: tuple[int, int]) -> HFSource:
        together = tensor(f"{name}.conv1d.weight", rows=rows, shape=(channels, 1, width))
        # transformers 5.23 saves equal thirds of conv1d under these names, however wide queries, keys and values are.
        names = tuple(f"{name}.{part}_conv1d.weight" for part in "qkv")
        return replace(together, names=names, cuts=(keys, keys, inner), alternatives=(together,))

    return sources | {
        f"{path}.conv_qk.weight": conv((0, 2 * keys)),
        f"{path}.conv_v.weight": conv((2 * keys, channels)),
        f"{path}.dt_bias": tensor(f"{name}.dt_bias"),
        f"{path}.a_log": tensor(f"{name}.A_log"),
    }


FAMILY = Family(
    name="OLMoHybrid",
    model_types=("olmo_hybrid",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
