"""Kimi Linear (Moonshot AI, 2025): three Kimi Delta Attentions to one attention over latents, each before an MLP or a
mixture of experts."""

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

_LATENT_NORM_EPS = 1e-6  # independent of the config's value for other norms


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `KimiLinearConfig`, or of Moonshot's own."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    fields.only("attention_bias", (False,))
    fields.only("mla_use_nope", (True,))
    fields.only("moe_router_activation_func", ("sigmoid",))
    fields.only("moe_layer_freq", (1,))
    if (rank := fields.given("q_lora_rank")) is not None:
        raise ModelConfigError(f"config field q_lora_rank is {rank!r}: only null is supported")
    hidden, eps = fields.integer("hidden_size", 2304), fields.number("rms_norm_eps", 1e-5)
    layers = fields.integer("num_hidden_layers", 27)
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 163840),
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
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        max_position_embeddings=fields.integer("model_max_length", 1048576, "max_position_embeddings"),
        bos_token_id=fields.token("bos_token_id", 163584),
        eos_token_ids=fields.tokens("eos_token_id", 163586),
    )


def _mixers(fields: Fields, layers: int) -> str:
    """`layer_types`, or Moonshot's lists of layers, counted from 1."""
    found = fields.layers({"linear_attention": DELTA, "full_attention": LATENT}, "layer_types")
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
    if len(found) != layers:
        raise ModelConfigError(f"config field layer_types has {len(found)} entries, for {layers} layers")
    return found


def feed_forward(fields: Fields, layers: int, *, dense: int) -> str:
    """MLPs and mixtures of experts, from `mlp_layer_types`, or the first layers dense: `dense` is the default."""
    found = fields.layers({"dense": MLP, "sparse": MOE}, "mlp_layer_types")
    if found is None:
        dense = min(fields.integer("first_k_dense_replace", dense), layers)
        found = MLP * dense + MOE * (layers - dense)
    if len(found) != layers:
        raise ModelConfigError(f"config field mlp_layer_types has {len(found)} entries, for {layers} layers")
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
    """Names as Moonshot's checkpoints and as transformers' modules have them. A layer there is two sublayers here."""
    body: dict[str, HFSource] = {}
    delta = config.recurrence(DELTA)
    assert isinstance(delta, DeltaConfig)
    for i in range(0, len(config.pattern), 2):
        name, first, second = f"layers.{i // 2}", f"blocks.{i}", f"blocks.{i + 1}"
        body[f"{first}.norm.weight"] = tensor(f"{name}.input_layernorm.weight")
        body[f"{second}.norm.weight"] = tensor(f"{name}.post_attention_layernorm.weight")
        if config.pattern[i] == LATENT:
            body |= latent_names(f"{first}.mixer", f"{name}.self_attn", need(config.latent_attention))
        else:
            body |= _delta_names(f"{first}.mixer", f"{name}.self_attn", delta)
        if config.pattern[i + 1] == MLP:
            body |= _mlp_names(f"{second}.mixer", name)
        else:
            body |= _moe_names(f"{second}.mixer", name, need(config.moe), config.hidden_size)
    return parts.whole_model(
        config, body, embed="embed_tokens.weight", norm="norm.weight", prefixes=("model.", "model.language_model.")
    )


def latent_names(path: str, name: str, config: LatentAttentionConfig) -> dict[str, HFSource]:
    """Of kv_b_proj, each head has the rows of its keys, then those of its values."""
    key, rows = config.key_size, config.key_size + config.value_size

    def of_each_head(first: int, end: int) -> HFSource:
        shape = config.num_heads * rows, config.latent_size
        return tensor(f"{name}.kv_b_proj.weight", rows=(first, end), shape=shape, pieces=config.num_heads)

    return {
        f"{path}.q_proj.weight": tensor(f"{name}.q_proj.weight"),
        f"{path}.latent_proj.weight": tensor(f"{name}.kv_a_proj_with_mqa.weight"),
        f"{path}.norm.weight": tensor(f"{name}.kv_a_layernorm.weight"),
        f"{path}.k_up.weight": of_each_head(0, key),
        f"{path}.v_up.weight": of_each_head(key, rows),
        f"{path}.o_proj.weight": tensor(f"{name}.o_proj.weight"),
    }


def _delta_names(path: str, name: str, config: DeltaConfig) -> dict[str, HFSource]:
    """transformers puts what decides about decays under `forget_gate`, and the three convolutions in one tensor."""
    spelt = {part: part for part in ("q_proj", "k_proj", "v_proj", "b_proj")}
    spelt |= {"z_proj.down": "g_a_proj", "z_proj.up": "g_b_proj", "norm": "o_norm", "out_proj": "o_proj"}
    sources = {f"{path}.{ours}.weight": tensor(f"{name}.{theirs}.weight") for ours, theirs in spelt.items()}
    spelt = {"a_proj.down.weight": "f_a_proj.weight", "a_proj.up.weight": "f_b_proj.weight", "dt_bias": "dt_bias"}
    for ours, theirs in spelt.items():
        sources[f"{path}.{ours}"] = tensor(f"{name}.{theirs}", f"{name}.forget_gate.{theirs}")
    sources[f"{path}.a_log"] = tensor(f"{name}.A_log", f"{name}.forget_gate.A_log", shape=(1, 1, config.num_heads, 1))
    inner, width = config.inner_size, config.conv_width
    each, together = (inner, 1, width), (3 * inner, 1, width)
    for ours, theirs, rows in (("conv_qk", "qk", (0, 2 * inner)), ("conv_v", "v", (2 * inner, 3 * inner))):
        sources[f"{path}.{ours}.weight"] = HFSource(
            tuple(f"{name}.{one}_conv1d.weight" for one in theirs),
            stored_shape=each,
            stack=len(theirs) > 1,
            alternatives=(tensor(f"{name}.conv1d.weight", rows=rows, shape=together),),
        )
    return sources


def _mlp_names(path: str, name: str) -> dict[str, HFSource]:
    """transformers saves the second spelling."""
    names = ("gate_proj", "up_proj", "down_proj")
    return {
        f"{path}.{part}.weight": tensor(f"{name}.mlp.{part}.weight", f"{name}.block_sparse_moe.{part}.weight")
        for part in names
    }


def _moe_names(path: str, name: str, config: MoEConfig, hidden: int) -> dict[str, HFSource]:
    """Experts one by one under `block_sparse_moe`, or (as in transformers' modules) in one tensor under `mlp`."""
    theirs, modules = f"{name}.block_sparse_moe", f"{name}.mlp"
    spelt = {"router.weight": "gate.weight", "router.correction_bias": "gate.e_score_correction_bias"}
    spelt |= {
        f"shared.{part}.weight": f"shared_experts.{part}.weight" for part in ("gate_proj", "up_proj", "down_proj")
    }
    sources = {f"{path}.{ours}": tensor(f"{theirs}.{one}", f"{modules}.{one}") for ours, one in spelt.items()}
    return sources | parts.experts(path, theirs, modules, config, hidden)


FAMILY = Family(
    name="KimiLinear",
    model_types=("kimi_linear",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
