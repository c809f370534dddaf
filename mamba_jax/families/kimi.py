"""Families of Kimi Delta Attention and attention over latents, each before an MLP or a mixture of experts.

Kimi Linear (Moonshot AI, 2025) has three Kimi Delta Attentions to one attention over latents. Ling 3.0 (inclusionAI,
2026) has five; its attention over latents has rotary positions and a gate for each head, and its decays have a bound.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mamba_jax.config import LATENT, MLP, MOE, HybridConfig, LatentAttentionConfig, MLPConfig, ModelConfigError
from mamba_jax.config.linear_recurrence import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource, placed
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_KINDS = {"linear_attention": DELTA, "full_attention": LATENT}
_LATENT_NORM_EPS = 1e-6  # independent of the config's value for other norms
_MOST_DRAFTS = 4
"""Layers of a checkpoint after the model's that are left out, at most."""


def kimi_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `KimiLinearConfig`, or of Moonshot's own."""
    fields.only("attention_bias", (False,))
    fields.only("mla_use_nope", (True,))
    fields.only("moe_router_activation_func", ("sigmoid",))
    fields.only("moe_layer_freq", (1,))
    fields.only("q_lora_rank", ())
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    layers = fields.integer("num_hidden_layers")
    pairs = zip(_kimi_mixers(fields, layers), _feed_forward(fields, layers), strict=True)
    inner = Fields(fields.mapping("linear_attn_config"))
    heads = inner.integer("num_heads", fields.integer("linear_num_heads"))
    size = inner.integer("head_dim", fields.integer("linear_head_dim"))
    width = inner.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim"))
    return HybridConfig(
        **parts.common_fields(fields, KIMI_LINEAR.name, hidden, eps)
        | {"max_position_embeddings": fields.integer("model_max_length", None, "max_position_embeddings")},
        pattern="".join(map("".join, pairs)),
        latent_attention=_latent_attention(fields),
        mlp=MLPConfig(fields.integer("intermediate_size")),
        moe=parts.moe_config(fields, shared=True),
        recurrences=(_delta_config(heads, size, width, eps, gate_rank=size),),
    )


def _latent_attention(fields: Fields, **options: Any) -> LatentAttentionConfig:
    return LatentAttentionConfig(
        num_heads=fields.integer("num_attention_heads"),
        key_size=fields.integer("qk_nope_head_dim", 128),
        shared_key_size=fields.integer("qk_rope_head_dim", 64),
        value_size=fields.integer("v_head_dim", 128),
        latent_size=fields.integer("kv_lora_rank", 512),
        norm_eps=_LATENT_NORM_EPS,
        **options,
    )


def _delta_config(heads: int, size: int, conv_width: int, eps: float, **options: Any) -> DeltaConfig:
    """Returns Kimi Delta Attention whose keys and values have the same size."""
    return DeltaConfig(
        num_heads=heads,
        head_dim=size,
        state_size=size,
        num_groups=heads,
        conv_width=conv_width,
        norm_eps=eps,
        decay="channel",
        output_gate="sigmoid",
        **options,
    )


def _kimi_mixers(fields: Fields, layers: int) -> str:
    """`layer_types`, or Moonshot's lists of layers, counted from 1."""
    found = fields.layers(_KINDS, "layer_types", count=layers)
    if found is None:
        inner = Fields(fields.mapping("linear_attn_config"))
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


def _feed_forward(fields: Fields, layers: int) -> str:
    """MLPs and mixtures of experts, from `mlp_layer_types`, or the first layers dense."""
    found = fields.layers({"dense": MLP, "sparse": MOE}, "mlp_layer_types", count=layers)
    if found is None:
        dense = min(fields.integer("first_k_dense_replace"), layers)
        found = MLP * dense + MOE * (layers - dense)
    return found


def _kimi_delta(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """transformers puts what decides about decays under `forget_gate`, and the three convolutions in one tensor."""
    inner, width = config.inner_size, config.conv_width
    spelt: dict[str, parts.Spelling] = {"z_proj.down": "g_a_proj", "z_proj.up": "g_b_proj"}
    spelt |= {"norm": "o_norm", "out_proj": "o_proj"}
    gates = {"a_proj.down": "f_a_proj", "a_proj.up": "f_b_proj", "dt_bias": "dt_bias", "a_log": "A_log"}
    spelt |= {ours: (theirs, f"forget_gate.{theirs}") for ours, theirs in gates.items()}
    sources = parts.named(config.parameters(), spelt, {"a_log": (1, 1, config.num_heads, 1)})
    sources |= _convolutions(config)
    for path, together in parts.consecutive("conv1d", {"conv_qk": 2 * inner, "conv_v": inner}, 1, width).items():
        sources[path] = replace(sources[path], alternatives=(together,))
    return sources


def _convolutions(config: DeltaConfig) -> dict[str, HFSource]:
    """Returns those of queries, keys and values, each in its own tensor."""
    sources = {}
    for ours, theirs in (("conv_qk", "qk"), ("conv_v", "v")):
        names, stored = tuple(f"{one}_conv1d.weight" for one in theirs), (config.inner_size, 1, config.conv_width)
        sources[f"{ours}.weight"] = HFSource(names, stored_shape=stored, stack=len(names) > 1)
    return sources


def ling3_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `BailingHybridConfig`, or of inclusionAI's own."""
    # transformers saves the context as model_max_length.
    fields.only("attention_bias", (False,))
    fields.only("rope_interleave", (True,))
    fields.only("no_kda_lora", (True,))
    fields.only("group_norm_size", ())  # lightning attention: Ling 2.5 and 2.6, which have the same model_type
    rope = fields.given("rope_parameters") or fields.given("rope_scaling") or {}
    if isinstance(rope, Mapping) and rope.get("mscale_all_dim"):
        raise ModelConfigError(f"config field mscale_all_dim is {rope['mscale_all_dim']!r}: only null is supported")
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    # transformers saves the size of rotated keys as head_dim.
    head_dim = fields.integer("linear_head_dim", fields.integer("head_dim", 128))
    bound = fields.number("kda_lower_bound") if fields.flag("kda_safe_gate") else None
    conv_width = fields.integer("short_conv_kernel_size")
    mixers = fields.layers(_KINDS, "layer_types", count=layers)
    if mixers is None:
        every = fields.integer("layer_group_size")
        mixers = "".join(DELTA if (i + 1) % every else LATENT for i in range(layers))
    pairs = zip(mixers, _feed_forward(fields, layers), strict=True)
    return HybridConfig(
        **parts.common_fields(fields, LING3.name, hidden, eps),
        pattern="".join(map("".join, pairs)),
        latent_attention=_latent_attention(
            fields,
            query_latent_size=fields.integer("q_lora_rank", 0),
            rope=rope_config(fields, fields.integer("qk_rope_head_dim", 64)),
            head_gate=True,
        ),
        mlp=MLPConfig(fields.integer("intermediate_size")),
        moe=parts.moe_config(fields, shared=True),
        recurrences=(_delta_config(heads, head_dim, conv_width, eps, log_decay_bound=bound),),
        mtp_pattern=_draft_pattern(fields),
    )


def _draft_pattern(fields: Fields) -> str:
    """Sublayers of the multi-token-prediction layer; none if there are several, each with its own weights."""
    for name, kind in (("mtp_layer_types", "full_attention"), ("mtp_mlp_layer_types", "sparse")):
        if set(found := fields.strings(name) or [kind]) != {kind}:
            raise ModelConfigError(f"config field {name} is {found!r}: only [{kind!r}] is supported")
    return LATENT + MOE if fields.integer("num_nextn_predict_layers", None, "num_mtp_layers") == 1 else ""


def ling3_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as inclusionAI's checkpoints have them. A layer there is two sublayers here."""
    mixers, count = parts.mixers(LING3.name, {DELTA: _ling_delta}), len(config.pattern) // 2
    body = parts.layers(config, mixers)
    if config.mtp_pattern:
        body |= parts.layers(config, mixers, pattern=config.mtp_pattern, path="mtp.blocks", first=count)
        frame: dict[str, parts.Spelling] = {one: one for one in ("enorm", "hnorm", "eh_proj")}
        frame["final_norm"] = "final_layernorm", "shared_head.norm"
        body |= placed("mtp", parts.weights(frame), f"layers.{count}.")
    return parts.whole_model(config, body, embed="word_embeddings.weight")


def _ling_delta(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    spelt: dict[str, parts.Spelling] = {"z_proj": "g_proj", "a_proj": "f_proj", "norm": "o_norm"}
    return parts.named(config.parameters(), spelt | {"out_proj": ("dense", "o_proj")}) | _convolutions(config)


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """Returns the multi-token-prediction layers, which follow the layers of the model, or copies of the model's tables
    in one."""
    layers = len(config.pattern) // 2
    drafts = r"(embed_tokens|shared_head\.head)\.weight" if config.mtp_pattern else r".*"
    return tuple(rf"model\.layers\.{layers + i}\.{drafts}" for i in range(_MOST_DRAFTS))


KIMI_LINEAR = parts.family("KimiLinear", ("kimi_linear",), kimi_from_hf, {DELTA: _kimi_delta})
LING3 = parts.family("Ling3", ("bailing_hybrid",), ling3_from_hf, ling3_names, _ignored)
