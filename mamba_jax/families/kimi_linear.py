"""Kimi Linear (Moonshot AI, 2025): three Kimi Delta Attentions to one attention over latents, each before an MLP or a
mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from mamba_jax.families.base import Family, HFSource, tensor, with_prefix
from mamba_jax.families.fields import Fields

_LATENT_NORM_EPS = 1e-6  # independent of the config's value for other norms


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `KimiLinearConfig`, or of Moonshot's own."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("attention_bias", (False,))
    fields.only("mla_use_nope", (True,))
    fields.only("moe_router_activation_func", ("sigmoid",))
    fields.only("moe_layer_freq", (1,))
    fields.only("q_lora_rank", ())
    hidden, eps = fields.integer("hidden_size", 2304), fields.number("rms_norm_eps", 1e-5)
    layers = fields.integer("num_hidden_layers", 27)
    return HybridConfig(
        **parts.common_fields(fields, vocab=163840, tied=False, bos=163584, eos=163586)
        | {"max_position_embeddings": fields.integer("model_max_length", 1048576, "max_position_embeddings")},
        family=FAMILY.name,
        hidden_size=hidden,
        pattern="".join(map("".join, zip(_mixers(fields, layers), feed_forward(fields, layers, dense=1), strict=True))),
        norm_eps=eps,
        latent_attention=LatentAttentionConfig(
            num_heads=fields.integer("num_attention_heads", 32),
            key_size=fields.integer("qk_nope_head_dim", 128),
            shared_key_size=fields.integer("qk_rope_head_dim", 64),
            value_size=fields.integer("v_head_dim", 128),
            latent_size=fields.integer("kv_lora_rank", 512),
            norm_eps=_LATENT_NORM_EPS,
        ),
        mlp=MLPConfig(fields.integer("intermediate_size", 9216), "silu", gated=True),
        moe=_moe(fields),
        recurrences=(_delta(fields, eps),),
    )


def _mixers(fields: Fields, layers: int) -> str:
    """`layer_types`, or Moonshot's lists of layers, counted from 1."""
    found = fields.layers({"linear_attention": DELTA, "full_attention": LATENT}, "layer_types", count=layers)
    if found is None:
        inner = _linear_fields(fields)
        latent, delta = (set(inner.integers(name, [])) for name in ("full_attn_layers", "kda_layers"))
        if latent or delta:
            if latent & delta or latent | delta != set(range(1, layers + 1)):
                raise ModelConfigError(
                    "config field linear_attn_config: full_attn_layers and kda_layers must together be the layers "
                    f"1 to {layers}, each once"
                )
        else:
            latent = set(range(5, layers + 1, 4))
        found = "".join(LATENT if i + 1 in latent else DELTA for i in range(layers))
    return found


def feed_forward(fields: Fields, layers: int, *, dense: int) -> str:
    """MLPs and mixtures of experts, from `mlp_layer_types`, or the first layers dense: `dense` is the default."""
    found = fields.layers({"dense": MLP, "sparse": MOE}, "mlp_layer_types", count=layers)
    if found is None:
        dense = min(fields.integer("first_k_dense_replace", dense), layers)
        found = MLP * dense + MOE * (layers - dense)
    return found


def _linear_fields(fields: Fields) -> Fields:
    inner = fields.given("linear_attn_config") or {}
    if not isinstance(inner, Mapping):
        raise ModelConfigError(f"config field linear_attn_config is {inner!r}: an object is expected")
    return Fields(inner)


def _delta(fields: Fields, eps: float) -> DeltaConfig:
    inner = _linear_fields(fields)
    heads = inner.integer("num_heads", fields.integer("linear_num_heads", 32))
    size = inner.integer("head_dim", fields.integer("linear_head_dim", 128))
    width = inner.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4))
    return DeltaConfig(
        num_heads=heads,
        head_dim=size,
        state_size=size,
        num_groups=heads,
        conv_width=width,
        norm_eps=eps,
        decay="channel",
        gate_rank=size,
        output_gate="sigmoid",
    )


def _moe(fields: Fields) -> MoEConfig:
    size = fields.integer("moe_intermediate_size", 1024)
    return MoEConfig(
        num_experts=fields.integer("num_experts", 256, "num_local_experts"),
        experts_per_token=fields.integer("num_experts_per_token", 8, "num_experts_per_tok"),
        intermediate_size=size,
        activation="silu",
        gated=True,
        router="sigmoid",
        num_groups=fields.integer("num_expert_group", 1, "n_group"),
        top_groups=fields.integer("topk_group", 1),
        normalize=fields.flag("moe_renormalize", True, "norm_topk_prob"),
        scaling=fields.number("routed_scaling_factor", 2.446),
        shared_size=size * fields.integer("num_shared_experts", 1, "n_shared_experts"),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Names as Moonshot's checkpoints and as transformers' modules have them. A layer there is two sublayers here.

    Experts are one by one under `block_sparse_moe`, or (as in transformers' modules) in one tensor under `mlp`, and
    transformers saves MLPs under `block_sparse_moe`.
    """
    moe = partial(parts.moe, correction="gate.e_score_correction_bias", shared="shared_experts", names=parts.MIXTRAL)
    mixers: parts.Mixers = {
        LATENT: ("self_attn", parts.latent_attention),
        DELTA: ("self_attn", _delta_names),
        MLP: (("mlp", "block_sparse_moe"), parts.mlp),
        MOE: (("block_sparse_moe", "mlp"), moe),
    }
    return parts.whole_model(config, parts.layers(config, mixers), prefixes=("model.", "model.language_model."))


def _delta_names(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """transformers puts what decides about decays under `forget_gate`, and the three convolutions in one tensor."""
    inner, width = config.inner_size, config.conv_width
    spelt = {part: part for part in ("q_proj", "k_proj", "v_proj", "b_proj")}
    spelt |= {"z_proj.down": "g_a_proj", "z_proj.up": "g_b_proj", "norm": "o_norm", "out_proj": "o_proj"}
    gates = parts.weights({"a_proj.down": "f_a_proj", "a_proj.up": "f_b_proj"}) | {
        "dt_bias": tensor("dt_bias"),
        "a_log": tensor("A_log", shape=(1, 1, config.num_heads, 1)),
    }
    sources = parts.weights(spelt) | with_prefix(gates, "", "forget_gate.") | convolutions(config, hidden)
    for part, rows in (("conv_qk", (0, 2 * inner)), ("conv_v", (2 * inner, 3 * inner))):
        together = tensor("conv1d.weight", rows=rows, shape=(3 * inner, 1, width))
        sources[f"{part}.weight"] = replace(sources[f"{part}.weight"], alternatives=(together,))
    return sources


def convolutions(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Returns those of queries, keys and values, each in its own tensor."""
    sources = {}
    for ours, theirs in (("conv_qk", "qk"), ("conv_v", "v")):
        names, stored = tuple(f"{one}_conv1d.weight" for one in theirs), (config.inner_size, 1, config.conv_width)
        sources[f"{ours}.weight"] = HFSource(names, stored_shape=stored, stack=len(names) > 1)
    return sources


FAMILY = Family("KimiLinear", ("kimi_linear",), config_from_hf, weight_names)
