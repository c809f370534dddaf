"""Mamba (Gu and Dao, 2023) and Falcon-Mamba (Technology Innovation Institute, 2024): Mamba-1 layers alone.

Falcon-Mamba also normalises B, C and what step sizes are projected from, without weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import HybridConfig
from mamba_jax.config.mamba1 import MAMBA1, Mamba1Config
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import Fields
from mamba_jax.families.mamba2 import backbone

_FALCON = "falcon_mamba"


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `MambaConfig` or `FalconMambaConfig`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden = fields.integer("hidden_size", 768)
    falcon = fields.given("model_type") == _FALCON
    mamba = Mamba1Config(
        # Falcon-Mamba's config.json has an `expand` that its own width contradicts.
        channels=fields.integer("intermediate_size", int(fields.number("expand", 2) * hidden)),
        state_size=fields.integer("state_size", 16),
        dt_rank=parts.dt_rank(fields, "time_step_rank", hidden),
        conv_width=fields.integer("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        norm_eps=fields.number("mixer_rms_eps", 1e-6) if falcon else None,
    )
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 50280),
        hidden_size=hidden,
        pattern=MAMBA1 * fields.integer("num_hidden_layers", 32),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        recurrences=(mamba,),
        residual_in_fp32=fields.flag("residual_in_fp32", True),
        tie_word_embeddings=fields.flag("tie_word_embeddings", True),
        bos_token_id=fields.token("bos_token_id", 0),
        eos_token_ids=fields.tokens("eos_token_id", 0),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `MambaForCausalLM` and `FalconMambaForCausalLM` have them."""
    (mamba,) = config.recurrences

    def mixer(path: str, name: str) -> dict[str, HFSource]:
        return parts.mamba1(path, name, mamba, config.hidden_size)  # type: ignore[arg-type]

    return backbone(config, mixer)


FAMILY = Family(
    name="Mamba",
    model_types=("mamba", _FALCON),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
