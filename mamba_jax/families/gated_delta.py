"""What Alibaba's families of gated delta nets share: layers, draft layer, and names of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mamba_jax.config import (
    ATTENTION,
    MLP,
    MOE,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    ModelConfigError,
    MoEConfig,
    QKNormConfig,
    need,
)
from mamba_jax.config.delta import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource, tensor, with_prefix
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

KINDS = {"linear_attention": DELTA, "full_attention": ATTENTION}
ROPE_SHARE = 0.25


@dataclass(frozen=True)
class Defaults:
    """transformers' values for fields that a config.json does not have, where families differ."""

    vocab_size: int
    hidden: int
    intermediate: int
    kv_heads: int


def model_config(
    fields: Fields,
    family: str,
    *,
    defaults: Defaults,
    feed_forward: Sequence[str],
    moe: MoEConfig | None,
    draft_layers: int,
) -> HybridConfig:
    """Returns the model; `feed_forward` is the sublayer after each layer's mixer."""
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", defaults.hidden), fields.number("rms_norm_eps", 1e-6)
    mixers = fields.layers(KINDS, "layer_types")
    if mixers is None:
        interval = fields.integer("full_attention_interval", 4)
        mixers = "".join(DELTA if (i + 1) % interval else ATTENTION for i in range(len(feed_forward)))
    if len(mixers) != len(feed_forward):
        raise ModelConfigError(
            f"config field layer_types has {len(mixers)} layers, num_hidden_layers is {len(feed_forward)}"
        )
    return HybridConfig(
        family=family,
        vocab_size=fields.integer("vocab_size", defaults.vocab_size),
        hidden_size=hidden,
        pattern="".join(mixer + after for mixer, after in zip(mixers, feed_forward, strict=True)),
        norm_eps=eps,
        norm_unit_offset=True,
        attention=_attention(fields, hidden, defaults.kv_heads, eps),
        mlp=MLPConfig(fields.integer("intermediate_size", defaults.intermediate), "silu", gated=True),
        moe=moe,
        recurrences=(_delta(fields, eps),),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("max_position_embeddings", 32768),
        bos_token_id=None if fields.given("bos_token_id") is None else fields.integer("bos_token_id", 0),
        eos_token_ids=() if fields.given("eos_token_id") is None else fields.tokens("eos_token_id", 0),
        mtp_pattern=ATTENTION + (MOE if moe else MLP) if draft_layers == 1 else "",
        unused_mtp_layers=draft_layers if draft_layers > 1 else 0,
    )


def _attention(fields: Fields, hidden: int, kv_heads: int, eps: float) -> AttentionConfig:
    heads, head_dim = fields.integer("num_attention_heads", 16), fields.integer("head_dim", 256)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=fields.key_value_heads(heads, kv_heads),
        head_dim=head_dim,
        scale=head_dim**-0.5,
        input_size=hidden,
        bias=fields.flag("attention_bias", False),
        rope=rope_config(fields, head_dim, share=fields.number("partial_rotary_factor", ROPE_SHARE)),
        qk_norm=QKNormConfig(eps, unit_offset=True),
        output_gate=True,
    )


def _delta(fields: Fields, eps: float) -> DeltaConfig:
    return DeltaConfig(
        num_heads=fields.integer("linear_num_value_heads", 32),
        head_dim=fields.integer("linear_value_head_dim", 128),
        state_size=fields.integer("linear_key_head_dim", 128),
        num_groups=fields.integer("linear_num_key_heads", 16),
        conv_width=fields.integer("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )


def moe_config(fields: Fields, *, num_experts: int, experts_per_token: int) -> MoEConfig | None:
    """Returns the mixture of experts; the numbers are defaults. None where a model has no experts."""
    experts = fields.integer("num_experts", num_experts)
    if not experts:
        return None
    return MoEConfig(
        num_experts=experts,
        experts_per_token=fields.integer("num_experts_per_tok", experts_per_token),
        intermediate_size=fields.integer("moe_intermediate_size", 512),
        activation="silu",
        gated=True,
        router="softmax",
        shared_size=fields.integer("shared_expert_intermediate_size", 512),
        shared_gate=True,
    )


def weight_names(
    config: HybridConfig, projections: Callable[[str, str, DeltaConfig, int], dict[str, HFSource]], *prefixes: str
) -> dict[str, HFSource]:
    """Returns every parameter. A layer in the file is two sublayers here; `projections` names a delta net's inputs."""
    body: dict[str, HFSource] = {}
    for i in range(0, len(config.pattern), 2):
        body |= _layer(f"layers.{i // 2}", "blocks", i, config.pattern[i : i + 2], config, projections)
    body |= {"embed.weight": tensor("embed_tokens.weight"), "final_norm.weight": tensor("norm.weight")}
    sources = with_prefix(body, *prefixes)
    if not config.tie_word_embeddings:
        sources["lm_head.weight"] = tensor("lm_head.weight")
    if config.mtp_pattern:
        sources |= _layer("mtp.layers.0", "mtp.blocks", 0, config.mtp_pattern, config, projections)
        frame = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "final_norm": "norm"}
        sources |= {f"mtp.{ours}.weight": tensor(f"mtp.{theirs}.weight") for ours, theirs in frame.items()}
    return sources


def _layer(
    name: str,
    path: str,
    index: int,
    kinds: str,
    config: HybridConfig,
    projections: Callable[[str, str, DeltaConfig, int], dict[str, HFSource]],
) -> dict[str, HFSource]:
    """Returns the weights of a mixer and of the sublayer after it."""
    first, second = f"{path}.{index}", f"{path}.{index + 1}"
    sources = {
        f"{first}.norm.weight": tensor(f"{name}.input_layernorm.weight"),
        f"{second}.norm.weight": tensor(f"{name}.post_attention_layernorm.weight"),
    }
    if kinds[0] == ATTENTION:
        sources |= parts.attention(f"{first}.mixer", f"{name}.self_attn", need(config.attention))
    else:
        delta = config.recurrence(DELTA)
        assert isinstance(delta, DeltaConfig)
        sources |= _delta_names(f"{first}.mixer", f"{name}.linear_attn", delta)
        sources |= projections(f"{first}.mixer", f"{name}.linear_attn", delta, config.hidden_size)
    if kinds[1] == MLP:
        return sources | parts.mlp(f"{second}.mixer", f"{name}.mlp", gated=True, bias=False)
    return sources | _moe_names(f"{second}.mixer", f"{name}.mlp", need(config.moe), config.hidden_size)


def _delta_names(path: str, name: str, config: DeltaConfig) -> dict[str, HFSource]:
    """Returns all of a delta net but its input projections. The channels of conv1d are queries, keys, values."""
    keys, channels = 2 * config.key_size, 2 * config.key_size + config.inner_size
    stored = (channels, 1, config.conv_width)
    return {
        f"{path}.conv_qk.weight": tensor(f"{name}.conv1d.weight", rows=(0, keys), shape=stored),
        f"{path}.conv_v.weight": tensor(f"{name}.conv1d.weight", rows=(keys, channels), shape=stored),
        f"{path}.dt_bias": tensor(f"{name}.dt_bias"),
        f"{path}.a_log": tensor(f"{name}.A_log"),
        f"{path}.norm.weight": tensor(f"{name}.norm.weight"),
        f"{path}.out_proj.weight": tensor(f"{name}.out_proj.weight"),
    }


def fused(path: str, name: str, config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Input projections in two tensors, key head by key head: query, key, values, gates; and strengths, decays."""
    groups, repeats = config.num_groups, config.num_heads // config.num_groups
    key, values = config.state_size, repeats * config.head_dim
    sources = {}
    for tensor_name, pieces in (
        ("in_proj_qkvz", {"q": key, "k": key, "v": values, "z": values}),
        ("in_proj_ba", {"b": repeats, "a": repeats}),
    ):
        shape, start = (groups * sum(pieces.values()), hidden), 0
        for part, size in pieces.items():
            rows = start, start + size
            sources[f"{path}.{part}_proj.weight"] = tensor(
                f"{name}.{tensor_name}.weight", rows=rows, shape=shape, pieces=groups
            )
            start += size
    return sources


def split(path: str, name: str, config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Input projections in four tensors, the first of them queries, keys and values."""
    keys, inner = config.key_size, config.inner_size
    sources = {f"{path}.{part}_proj.weight": tensor(f"{name}.in_proj_{part}.weight") for part in "zba"}
    for part, rows in (("q", (0, keys)), ("k", (keys, 2 * keys)), ("v", (2 * keys, 2 * keys + inner))):
        shape = (2 * keys + inner, hidden)
        sources[f"{path}.{part}_proj.weight"] = tensor(f"{name}.in_proj_qkv.weight", rows=rows, shape=shape)
    return sources


def _moe_names(path: str, name: str, config: MoEConfig, hidden: int) -> dict[str, HFSource]:
    """Returns a router, experts, and a shared expert with a gate."""
    sources = parts.experts(path, name, name, config, hidden, ("gate_proj", "up_proj", "down_proj"))
    for ours, theirs in (("router", "gate"), ("shared_gate", "shared_expert_gate")):
        sources[f"{path}.{ours}.weight"] = tensor(f"{name}.{theirs}.weight")
    return sources | parts.mlp(f"{path}.shared", f"{name}.shared_expert", gated=True, bias=False)


def ignored(config: HybridConfig) -> tuple[str, ...]:
    """Also the multi-token-prediction layer where the config has none."""
    drafts = () if config.mtp_pattern else (r"mtp\..*",)
    return (*parts.always_ignored(config), *drafts)
