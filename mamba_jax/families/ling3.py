"""Ling 3.0 (inclusionAI, 2026): five Kimi Delta Attentions to one attention over latents, each before an MLP or
experts.

Unlike Kimi Linear, attention over latents has rotary positions and a gate for each head, and the decays have a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from mamba_jax.config import (
    LATENT,
    MLP,
    MOE,
    HybridConfig,
    LatentAttentionConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
)
from mamba_jax.config.delta import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, placed, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.kimi_linear import convolutions, feed_forward
from mamba_jax.families.rope import rope_config

_ROPE_THETA = 6e6
_MOST_DRAFTS = 4
"""Layers of a checkpoint after the model's that are left out, at most."""


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `BailingHybridConfig`, or of inclusionAI's own."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("attention_bias", (False,))
    fields.only("rope_interleave", (True,))
    fields.only("no_kda_lora", (True,))
    fields.only("q_lora_rank", ())
    rope = fields.given("rope_parameters") or fields.given("rope_scaling") or {}
    if isinstance(rope, Mapping) and rope.get("mscale_all_dim"):
        raise ModelConfigError(f"config field mscale_all_dim is {rope['mscale_all_dim']!r}: only null is supported")
    hidden, eps = fields.integer("hidden_size", 2560), fields.number("rms_norm_eps", 1e-6)
    layers, heads = fields.integer("num_hidden_layers", 42), fields.integer("num_attention_heads", 32)
    # transformers saves the size of rotated keys as head_dim.
    head_dim = fields.integer("linear_head_dim", fields.integer("head_dim", 128))
    shared_key_size = fields.integer("qk_rope_head_dim", 64)
    pairs = zip(_mixers(fields, layers), feed_forward(fields, layers, dense=2), strict=True)
    return HybridConfig(
        **parts.common_fields(fields, vocab=157184, tied=False, bos=None, eos=156895)
        | {"max_position_embeddings": fields.integer("max_position_embeddings", 262144, "model_max_length")},
        family=FAMILY.name,
        hidden_size=hidden,
        pattern="".join(map("".join, pairs)),
        norm_eps=eps,
        latent_attention=LatentAttentionConfig(
            num_heads=heads,
            key_size=fields.integer("qk_nope_head_dim", 128),
            shared_key_size=shared_key_size,
            value_size=fields.integer("v_head_dim", 128),
            latent_size=fields.integer("kv_lora_rank", 512),
            norm_eps=eps,
            rope=rope_config(fields, shared_key_size, theta=_ROPE_THETA),
            head_gate=True,
        ),
        mlp=MLPConfig(fields.integer("intermediate_size", 6144), "silu", gated=True),
        moe=_moe(fields),
        recurrences=(
            DeltaConfig(
                num_heads=heads,
                head_dim=head_dim,
                state_size=head_dim,
                num_groups=heads,
                conv_width=fields.integer("short_conv_kernel_size", 4),
                norm_eps=eps,
                decay="channel",
                log_decay_bound=fields.number("kda_lower_bound", -5.0) if fields.flag("kda_safe_gate", True) else None,
                output_gate="sigmoid",
            ),
        ),
        mtp_pattern=_draft_pattern(fields),
    )


def _mixers(fields: Fields, layers: int) -> str:
    found = fields.layers({"linear_attention": DELTA, "full_attention": LATENT}, "layer_types", count=layers)
    if found is None:
        every = fields.integer("layer_group_size", 6)
        found = "".join(DELTA if (i + 1) % every else LATENT for i in range(layers))
    return found


def _draft_pattern(fields: Fields) -> str:
    """Sublayers of the multi-token-prediction layer; none if there are several, each with its own weights."""
    for name, kind in (("mtp_layer_types", "full_attention"), ("mtp_mlp_layer_types", "sparse")):
        if set(found := fields.strings(name) or [kind]) != {kind}:
            raise ModelConfigError(f"config field {name} is {found!r}: only [{kind!r}] is supported")
    return LATENT + MOE if fields.integer("num_nextn_predict_layers", 1, "num_mtp_layers") == 1 else ""


def _moe(fields: Fields) -> MoEConfig:
    size = fields.integer("moe_intermediate_size", 768)
    return MoEConfig(
        num_experts=fields.integer("num_experts", 512, "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_tok", 8, "num_experts_per_token"),
        intermediate_size=size,
        activation="silu",
        gated=True,
        router="sigmoid",
        num_groups=fields.integer("n_group", 8, "num_expert_group"),
        top_groups=fields.integer("topk_group", 4),
        normalize=fields.flag("norm_topk_prob", True, "moe_renormalize"),
        scaling=fields.number("routed_scaling_factor", 2.5),
        shared_size=size * fields.integer("num_shared_experts", 1, "n_shared_experts"),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as inclusionAI's checkpoints have them. A layer there is two sublayers here."""
    mixers: parts.Mixers = {
        LATENT: ("attention", partial(parts.latent_attention, output=("dense", "o_proj"))),
        DELTA: ("attention", _delta_names),
        MLP: ("mlp", parts.mlp),
        MOE: ("mlp", partial(parts.moe, correction="gate.expert_bias", shared="shared_experts")),
    }
    body, count = parts.layers(config, mixers), len(config.pattern) // 2
    if config.mtp_pattern:
        body |= parts.layers(config, mixers, pattern=config.mtp_pattern, path="mtp.blocks", first=count)
        frame: dict[str, parts.Spelling] = {one: one for one in ("enorm", "hnorm", "eh_proj")}
        frame["final_norm"] = "final_layernorm", "shared_head.norm"
        body |= placed("mtp", parts.weights(frame), f"layers.{count}.")
    return parts.whole_model(config, body, embed="word_embeddings.weight")


def _delta_names(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    spelt: dict[str, parts.Spelling] = {part: part for part in ("q_proj", "k_proj", "v_proj", "b_proj")}
    spelt |= {"z_proj": "g_proj", "a_proj": "f_proj", "norm": "o_norm", "out_proj": ("dense", "o_proj")}
    sources = parts.weights(spelt) | convolutions(config, hidden)
    return sources | {"dt_bias": tensor("dt_bias"), "a_log": tensor("A_log")}


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """Returns the multi-token-prediction layers, which follow the layers of the model, or copies of the model's tables
    in one."""
    layers = len(config.pattern) // 2
    drafts = r"(embed_tokens|shared_head\.head)\.weight" if config.mtp_pattern else r".*"
    return tuple(rf"model\.layers\.{layers + i}\.{drafts}" for i in range(_MOST_DRAFTS))


FAMILY = Family("Ling3", ("bailing_hybrid",), config_from_hf, weight_names, _ignored)
