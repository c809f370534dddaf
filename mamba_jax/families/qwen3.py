"""Qwen3-Next (Alibaba, 2025): three gated delta nets to one gated attention, each followed by a mixture of experts.

Qwen3.5 (2026) is the same with plain MLPs or mixtures of experts; its text model only. Lara 4 Mini (Translated, 2026)
has gated delta nets, attention to a window, and attention to everything without positions, each followed by a mixture
of experts. OLMo Hybrid (Ai2, 2025): three gated delta nets to one attention normalized after, each before an MLP.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from mamba_jax.config import (
    ATTENTION,
    MLP,
    MOE,
    WINDOWED,
    AttentionConfig,
    HybridConfig,
    MLPConfig,
    MoEConfig,
    QKNormConfig,
)
from mamba_jax.config.linear_recurrence import DELTA, DeltaConfig
from mamba_jax.families import mtp, parts
from mamba_jax.families.base import HFSource, placed, tensor
from mamba_jax.families.fields import Fields

_KINDS = {"linear_attention": DELTA, "full_attention": ATTENTION}
_OLMO_NORM_EPS = 1e-5  # of the gated norm; the config sets only that of the other norms
_DENSE, _SPARSE = ("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")


def qwen3_next_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `Qwen3NextConfig`."""
    fields.only("norm_topk_prob", (True,))
    layers, step = fields.integer("num_hidden_layers"), fields.integer("decoder_sparse_step", 1)
    moe = _moe(fields)
    dense = set(range(layers)) if moe is None else set(fields.integers("mlp_only_layers", []))
    feed_forward = [MLP if i in dense or (i + 1) % step else MOE for i in range(layers)]
    return _model(fields, QWEN3_NEXT.name, feed_forward, moe, fields.integer("num_nextn_predict_layers"))


def qwen3_5_from_hf(fields: Fields) -> HybridConfig:
    """Reads the text part of transformers' `Qwen3_5Config` or `Qwen3_5MoeConfig`."""
    if sparse := fields.given("model_type") in _SPARSE:
        fields = Fields.of(fields.raw, f"{QWEN3_5.name} with experts")
    feed_forward = [MOE if sparse else MLP] * fields.integer("num_hidden_layers")
    moe = _moe(fields) if sparse else None
    return _model(fields, QWEN3_5.name, feed_forward, moe, fields.integer("mtp_num_hidden_layers"))


def lara_mini_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `LaraMiniConfig`."""
    fields.only("norm_topk_prob", (True,))
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    layers = fields.integer("num_hidden_layers")
    kinds = _KINDS | {"sliding_attention": WINDOWED}
    every_fifth = DELTA + WINDOWED + DELTA + ATTENTION + WINDOWED
    mixers = fields.layers(kinds, "layer_types", count=layers) or "".join(every_fifth[i % 5] for i in range(layers))

    def attention(rope: Mapping[str, Any] | None, window: int | None) -> AttentionConfig:
        return parts.attention_config(fields, hidden, rope=rope, qk_norm=QKNormConfig(eps), window=window)

    return HybridConfig(
        **parts.common_fields(fields, LARA_MINI.name, hidden, eps),
        pattern="".join(mixer + MOE for mixer in mixers),
        attention=attention(None, None) if ATTENTION in mixers else None,
        windowed_attention=attention({"layers": "sliding_attention"}, fields.integer("sliding_window"))
        if WINDOWED in mixers
        else None,
        moe=_moe(fields, shared_gate=False),
        recurrences=(parts.delta_config(fields, eps),),
    )


def _model(
    fields: Fields, family: str, feed_forward: Sequence[str], moe: MoEConfig | None, draft_layers: int
) -> HybridConfig:
    """Returns the model; `feed_forward` is the sublayer after each layer's mixer."""
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    mixers = fields.layers(_KINDS, "layer_types", count=len(feed_forward))
    if mixers is None:
        interval = fields.integer("full_attention_interval")
        mixers = "".join(DELTA if (i + 1) % interval else ATTENTION for i in range(len(feed_forward)))
    return HybridConfig(
        **parts.common_fields(fields, family, hidden, eps),
        pattern="".join(mixer + after for mixer, after in zip(mixers, feed_forward, strict=True)),
        norm_unit_offset=True,
        attention=parts.attention_config(
            fields,
            hidden,
            rope={"share": fields.number("partial_rotary_factor")},
            qk_norm=QKNormConfig(eps, unit_offset=True),
            output_gate=True,
        ),
        mlp=MLPConfig(fields.integer("intermediate_size")),
        moe=moe,
        recurrences=(parts.delta_config(fields, eps),),
        mtp_pattern=ATTENTION + (MOE if moe else MLP) if draft_layers == 1 else "",
        unused_mtp_layers=draft_layers if draft_layers > 1 else 0,
    )


def _moe(fields: Fields, *, shared_gate: bool = True) -> MoEConfig | None:
    """Returns the mixture of experts. None where a model has no experts."""
    if not fields.integer("num_experts"):
        return None
    shared = fields.integer("shared_expert_intermediate_size")
    return parts.moe_config(fields, router="softmax", shared_size=shared, shared_gate=shared_gate)


def _weight_names(
    config: HybridConfig, projections: Callable[[DeltaConfig, int], dict[str, HFSource]]
) -> dict[str, HFSource]:
    """Names as `Qwen3NextForCausalLM` and `Qwen3_5ForCausalLM` have them; `mtp.*` as Alibaba's checkpoints have it.

    `projections` names a delta net's inputs.
    """
    own: dict[str, parts.Names] = {DELTA: lambda delta, hidden: _delta(delta) | projections(delta, hidden)}
    sources = parts.naming(config.family, own)(config)
    if not config.mtp_pattern:
        return sources
    mixers = parts.mixers(config.family, own)
    sources |= mtp.sublayers(config, mixers, "input_layernorm", "post_attention_layernorm")
    frame = {"enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "final_norm": "norm"}
    return sources | placed("mtp", parts.weights(frame), "mtp.")


def _delta(config: DeltaConfig) -> dict[str, HFSource]:
    """Returns all of a delta net but its input projections. The channels of conv1d are queries, keys, values."""
    channels = {"conv_qk": 2 * config.key_size, "conv_v": config.inner_size}
    conv = parts.consecutive("conv1d", channels, 1, config.conv_width)
    return parts.named(("dt_bias", "a_log", "norm.weight", "out_proj.weight")) | conv


def _fused(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Input projections in two tensors, key head by key head: query, key, values, gates; and strengths, decays."""
    groups, repeats = config.num_groups, config.num_heads // config.num_groups
    key, values = config.state_size, repeats * config.head_dim
    qkvz = {"q_proj": key, "k_proj": key, "v_proj": values, "z_proj": values}
    sources = parts.consecutive("in_proj_qkvz", qkvz, hidden, pieces=groups)
    return sources | parts.consecutive("in_proj_ba", {"b_proj": repeats, "a_proj": repeats}, hidden, pieces=groups)


def _split(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Input projections in four tensors, the first of them queries, keys and values."""
    qkv = {"q_proj": config.key_size, "k_proj": config.key_size, "v_proj": config.inner_size}
    others = parts.weights({f"{part}_proj": f"in_proj_{part}" for part in "zba"})
    return others | parts.consecutive("in_proj_qkv", qkv, hidden)


def _joined(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    """Input projections in one tensor: queries, keys, values, gates, strengths, decays. Or in four, as `_split`."""
    sizes = {"q_proj": config.key_size, "k_proj": config.key_size, "v_proj": config.inner_size}
    sizes |= {"z_proj": config.inner_size, "b_proj": config.num_heads, "a_proj": config.num_heads}
    sources, apart = parts.consecutive("in_proj", sizes, hidden), _split(config, hidden)
    sources = {path: replace(source, alternatives=(apart[path],)) for path, source in sources.items()}
    return _delta(config) | sources | parts.weights({"norm": ("out_norm", "norm")})


LARA_MINI = parts.family("LaraMini", ("lara_mini",), lara_mini_from_hf, {DELTA: _joined})
qwen3_next_names, qwen3_5_names = (partial(_weight_names, projections=each) for each in (_fused, _split))
QWEN3_NEXT = parts.family("Qwen3Next", ("qwen3_next",), qwen3_next_from_hf, qwen3_next_names, mtp.unused)
QWEN3_5 = parts.family("Qwen3.5", _DENSE + _SPARSE, qwen3_5_from_hf, qwen3_5_names, mtp.unused)


def olmo_hybrid_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `OlmoHybridConfig`."""
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    layers, heads = fields.integer("num_hidden_layers"), fields.integer("num_attention_heads")
    mixers = fields.layers(_KINDS, "layer_types", count=layers)
    if mixers is None:
        mixers = "".join(ATTENTION if i % 4 == 3 else DELTA for i in range(layers))
        mixers = mixers if ATTENTION in mixers else mixers[:-1] + ATTENTION
    pattern = "".join(mixer + MLP for mixer in mixers)
    rope = fields.given("rope_parameters", "rope_scaling")
    # Published without positions: rope_parameters is null, or has no theta.
    rotates = isinstance(rope, Mapping) and rope.get("rope_theta") is not None
    groups = fields.integer("linear_num_key_heads", heads)
    keys = fields.integer("linear_key_head_dim", int(0.75 * hidden / max(groups, 1)))
    sizes = {"values": heads, "keys": groups, "value_size": 2 * keys, "key_size": keys}
    beta = 2.0 if fields.flag("linear_allow_neg_eigval") else 1.0
    return HybridConfig(
        **parts.common_fields(fields, OLMO_HYBRID.name, hidden, eps),
        pattern=pattern,
        # Both sublayers of a layer with attention.
        norm_after=tuple(i for i in range(len(pattern)) if pattern[i - i % 2] == ATTENTION),
        attention=parts.attention_config(
            fields, hidden, rope={} if rotates else None, qk_norm=QKNormConfig(eps, all_heads=True)
        ),
        mlp=MLPConfig(fields.integer("intermediate_size")),
        recurrences=(parts.delta_config(fields, _OLMO_NORM_EPS, **sizes, beta=beta),),
    )


def _olmo_delta_names(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
    keys, inner, width = config.key_size, config.inner_size, config.conv_width
    sources = parts.named(config.parameters(), {"z_proj": "g_proj", "out_proj": "o_proj", "norm": "o_norm"})
    channels = 2 * keys + inner
    for part, rows in (("conv_qk", (0, 2 * keys)), ("conv_v", (2 * keys, channels))):
        together = tensor("conv1d.weight", rows=rows, shape=(channels, 1, width))
        # transformers 5.23 saves equal thirds of conv1d under these names, however wide queries, keys and values are.
        names = tuple(f"{one}_conv1d.weight" for one in "qkv")
        cuts = replace(together, names=names, cuts=(keys, keys, inner), alternatives=(together,))
        sources[f"{part}.weight"] = cuts
    return sources


OLMO_HYBRID = parts.family("OLMoHybrid", ("olmo_hybrid",), olmo_hybrid_from_hf, {DELTA: _olmo_delta_names})
