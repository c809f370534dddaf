"""MiniMax-Text-01 and M1 (MiniMax, 2025): lightning attention or softmax attention, each before a mixture of experts.

A sublayer adds what its mixer gives to the normalized input, not to the input as it came.
"""

from dataclasses import replace

from mamba_jax.config import ATTENTION, MOE, HybridConfig, ModelConfigError, NormedResidual
from mamba_jax.config.linear_recurrence import LIGHTNING, LightningConfig
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource
from mamba_jax.families.fields import Fields
from mamba_jax.families.rope import rope_config

_LIGHTNING_NORM_EPS = 1e-6  # independent of the config's value for other norms


def config_from_hf(fields: Fields) -> HybridConfig:
    """Reads a config.json of transformers' `MiniMaxConfig`, or of MiniMax's own."""
    fields.only("postnorm", (True,))
    fields.only("shared_intermediate_size", (0,))
    parts.refuse_window(fields)
    hidden, eps = fields.integer("hidden_size"), fields.number("rms_norm_eps")
    mixers = _mixers(fields, fields.integer("num_hidden_layers"))
    # MiniMax's own code rotates part of each head; transformers knows no such field.
    attention = parts.attention_config(fields, hidden, rope=None, bias=False)
    # Decays slow down from layer to layer: by a factor from 1 down to 1e-5.
    last = len(mixers) - 1 + 1e-5
    factors = tuple(1 - layer / last + 1e-5 for layer, mixer in enumerate(mixers) if mixer == LIGHTNING)
    rope = rope_config(fields, fields.integer("rotary_dim", attention.head_dim))
    return HybridConfig(
        **parts.common_fields(fields, FAMILY.name, hidden, eps),
        pattern="".join(mixer + MOE for mixer in mixers),
        attention=replace(attention, rope=rope),
        moe=parts.moe_config(fields, size_field="intermediate_size", router="softmax"),
        recurrences=(LightningConfig(attention.num_heads, attention.head_dim, _LIGHTNING_NORM_EPS, factors),),
        normed_residuals=(
            _residual(fields, LIGHTNING, "linear_attn", "linear_attention"),
            _residual(fields, ATTENTION, "full_attn", "full_attention"),
            _residual(fields, MOE, "mlp", "mlp"),
        ),
    )


def _mixers(fields: Fields, layers: int) -> str:
    """`layer_types`, or MiniMax's list of 0 (lightning) and 1 (softmax); every other layer without either."""
    found = fields.layers({"linear_attention": LIGHTNING, "full_attention": ATTENTION}, "layer_types", count=layers)
    if found is None:
        kinds = fields.integers("attn_type_list", [(i + 1) % 2 for i in range(layers)])
        if not set(kinds) <= {0, 1} or len(kinds) != layers:
            raise ModelConfigError(
                f"config field attn_type_list is {kinds}: expected 0 or 1 for each of {layers} layers"
            )
        found = "".join(ATTENTION if kind else LIGHTNING for kind in kinds)
    return found


def _residual(fields: Fields, kind: str, name: str, published: str) -> NormedResidual:
    return NormedResidual(
        kind,
        fields.number(f"{name}_alpha_factor", 1.0, f"layernorm_{published}_alpha"),
        fields.number(f"{name}_beta_factor", 1.0, f"layernorm_{published}_beta"),
    )


def _lightning(config: LightningConfig, hidden: int) -> dict[str, HFSource]:
    return parts.named(config.parameters(), {"gate_proj": "output_gate"})


def _ignored(config: HybridConfig) -> tuple[str, ...]:
    """transformers also saves what it computes from the decay rates."""
    return (r"model\.layers\.\d+\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",)


TYPES = ("minimax", "minimax_text_01", "minimax_m1")
FAMILY = parts.family("MiniMax", TYPES, config_from_hf, {LIGHTNING: _lightning}, _ignored)
