"""Ling 3.0 (inclusionAI, 2026): five Kimi Delta Attentions to one attention over latents, each before an MLP or
experts.

Unlike Kimi Linear, attention over latents has rotary positions and a gate for each head, and the decays have a bound.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    need,
)
from mamba_jax.config.delta import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields
from mamba_jax.families.kimi_linear import feed_forward, latent_names
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
    if (rank := fields.given("q_lora_rank")) is not None:
        raise ModelConfigError(f"config field q_lora_rank is {rank!r}: only null is supported")
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
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 157184),
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
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 262144, "model_max_length"),
        bos_token_id=None if fields.given("bos_token_id") is None else fields.token("bos_token_id", 0),
        eos_token_ids=fields.tokens("eos_token_id", 156895),
    )


def _mixers(fields: Fields, layers: int) -> str:
    found = fields.layers({"linear_attention": DELTA, "full_attention": LATENT}, "layer_types")
    if found is None:
        every = fields.integer("layer_group_size", 6)
        found = "".join(DELTA if (i + 1) % every else LATENT for i in range(layers))
    if len(found) != layers:
        raise ModelConfigError(f"config field layer_types has {len(found)} entries, for {layers} layers")
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
    body: dict[str, HFSource] = {}
    for i in range(0, len(config.pattern), 2):
        body |= _layer(f"layers.{i // 2}", "blocks", i, config.pattern[i : i + 2], config)
    if config.mtp_pattern:
        name = f"layers.{len(config.pattern) // 2}"
        body |= _layer(name, "mtp.blocks", 0, config.mtp_pattern, config)
        body |= {f"mtp.{one}.weight": tensor(f"{name}.{one}.weight") for one in ("enorm", "hnorm", "eh_proj")}
        body["mtp.final_norm.weight"] = tensor(f"{name}.final_layernorm.weight", f"{name}.shared_head.norm.weight")
    return parts.whole_model(config, body, embed="word_embeddings.weight", norm="norm.weight", prefixes=("model.",))


def _layer(name: str, path: str, index: int, kinds: str, config: HybridConfig) -> dict[str, HFSource]:
    """Returns the weights of a mixer and of the sublayer after it."""
    first, second = f"{path}.{index}", f"{path}.{index + 1}"
    sources = {
        f"{first}.norm.weight": tensor(f"{name}.input_layernorm.weight"),
        f"{second}.norm.weight": tensor(f"{name}.post_attention_layernorm.weight"),
    }
    if kinds[0] == LATENT:
        sources |= latent_names(f"{first}.mixer", f"{name}.attention", need(config.latent_attention))
        sources[f"{first}.mixer.gate_proj.weight"] = tensor(f"{name}.attention.g_proj.weight")
        output = f"{first}.mixer.o_proj.weight"
    else:
        delta = config.recurrence(DELTA)
        assert isinstance(delta, DeltaConfig)
        sources |= _delta_names(f"{first}.mixer", f"{name}.attention", delta)
        output = f"{first}.mixer.out_proj.weight"
    sources[output] = tensor(f"{name}.attention.dense.weight", f"{name}.attention.o_proj.weight")
    mlp, path = f"{name}.mlp", f"{second}.mixer"
    if kinds[1] == MLP:
        return sources | parts.mlp(path, mlp, gated=True, bias=False)
    spelt = ("gate_proj", "up_proj", "down_proj")
    sources |= parts.experts(path, mlp, mlp, need(config.moe), config.hidden_size, spelt)
    sources |= parts.mlp(f"{path}.shared", f"{mlp}.shared_experts", gated=True, bias=False)
    sources[f"{path}.router.weight"] = tensor(f"{mlp}.gate.weight")
    sources[f"{path}.router.correction_bias"] = tensor(f"{mlp}.gate.expert_bias")
    return sources


def _delta_names(path: str, name: str, config: DeltaConfig) -> dict[str, HFSource]:
    spelt = {part: part for part in ("q_proj", "k_proj", "v_proj", "b_proj")}
    spelt |= {"z_proj": "g_proj", "a_proj": "f_proj", "norm": "o_norm"}
    sources = {f"{path}.{ours}.weight": tensor(f"{name}.{theirs}.weight") for ours, theirs in spelt.items()}
    sources |= {f"{path}.dt_bias": tensor(f"{name}.dt_bias"), f"{path}.a_log": tensor(f"{name}.A_log")}
    inner, width = config.inner_size, config.conv_width
    for ours, theirs in (("conv_qk", "qk"), ("conv_v", "v")):
        names = tuple(f"{name}.{one}_conv1d.weight" for one in theirs)
        sources[f"{path}.{ours}.weight"] = HFSource(names, stored_shape=(inner, 1, width), stack=len(names) > 1)
    return sources


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """Also the multi-token-prediction layers, which follow the layers of the model, or copies of the model's tables in
    one."""
    layers = len(config.pattern) // 2
    drafts = r"(embed_tokens|shared_head\.head)\.weight" if config.mtp_pattern else r".*"
    return (*parts.always_ignored(config), *(rf"model\.layers\.{layers + i}\.{drafts}" for i in range(_MOST_DRAFTS)))


FAMILY = Family(
    name="Ling3",
    model_types=("bailing_hybrid",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=_ignored,
)
