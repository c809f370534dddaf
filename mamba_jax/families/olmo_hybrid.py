"""OLMo Hybrid (Ai2, 2025): three gated delta nets to one attention normalized after, each before an MLP."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mamba_jax.config import ATTENTION, MLP, AttentionConfig, HybridConfig, MLPConfig, QKNormConfig
from mamba_jax.config.linear_recurrence import DELTA, DeltaConfig
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields

_NORM_EPS = 1e-5  # of the gated norm; the config sets only that of the other norms


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `OlmoHybridConfig`."""
    fields = Fields(raw, positions=65536)
    hidden, eps = fields.integer("hidden_size", 3840), fields.number("rms_norm_eps", 1e-6)
    layers, heads = fields.integer("num_hidden_layers", 32), fields.integer("num_attention_heads", 30)
    mixers = fields.layers({"linear_attention": DELTA, "full_attention": ATTENTION}, "layer_types", count=layers)
    if mixers is None:
        mixers = "".join(ATTENTION if i % 4 == 3 else DELTA for i in range(layers))
        mixers = mixers if ATTENTION in mixers else mixers[:-1] + ATTENTION
    pattern = "".join(mixer + MLP for mixer in mixers)
    return HybridConfig(
        **parts.common_fields(fields, FAMILY.name, hidden, eps, vocab=100352, tied=False, bos=None, eos=100257),
        pattern=pattern,
        # Both sublayers of a layer with attention.
        norm_after=tuple(i for i in range(len(pattern)) if pattern[i - i % 2] == ATTENTION),
        attention=_attention(fields, hidden, heads, eps),
        mlp=MLPConfig(fields.integer("intermediate_size", 11008)),
        recurrences=(_delta(fields, hidden, heads),),
    )


def _attention(fields: Fields, hidden: int, heads: int, eps: float) -> AttentionConfig:
    rope = fields.given("rope_parameters", "rope_scaling")
    # Published without positions: rope_parameters is null, or has no theta.
    rotates = isinstance(rope, Mapping) and rope.get("rope_theta") is not None
    norm = QKNormConfig(eps, all_heads=True)
    return parts.attention_config(
        fields, hidden, num_heads=heads, num_kv_heads=None, rope={} if rotates else None, qk_norm=norm
    )


def _delta(fields: Fields, hidden: int, heads: int) -> DeltaConfig:
    groups = fields.integer("linear_num_key_heads", heads)
    keys = fields.integer("linear_key_head_dim", int(0.75 * hidden / max(groups, 1)))
    beta = 2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0
    return parts.delta_config(
        fields, _NORM_EPS, values=heads, keys=groups, value_size=2 * keys, key_size=keys, beta=beta
    )


def _delta_names(config: DeltaConfig, hidden: int) -> dict[str, HFSource]:
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


weight_names = parts.naming(
    {ATTENTION: ("self_attn", parts.attention), DELTA: ("linear_attn", _delta_names), MLP: ("mlp", parts.mlp)},
    # The second spellings are what transformers saves.
    norms=(("attention_layer_norm", "input_layernorm"), ("feedforward_layer_norm", "post_attention_layernorm")),
    norms_after=(("post_attention_layernorm", "feedforward_layer_norm"), "post_feedforward_layernorm"),
    prefixes=("model.", "model.language_model."),
)
"""As Ai2's checkpoints have them, and as transformers' modules do. A layer there is two sublayers here."""
FAMILY = Family("OLMoHybrid", ("olmo_hybrid",), config_from_hf, weight_names)
