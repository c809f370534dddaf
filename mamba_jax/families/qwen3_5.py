"""Qwen3.5 (Alibaba, 2026): as Qwen3-Next, with plain MLPs or mixtures of experts; its text model only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import MLP, MOE, HybridConfig
from mamba_jax.families import gated_delta
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import Fields

DENSE, SPARSE = ("qwen3_5", "qwen3_5_text"), ("qwen3_5_moe", "qwen3_5_moe_text")


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads the text part of transformers' `Qwen3_5Config` or `Qwen3_5MoeConfig`."""
    fields = Fields(raw)
    sparse = raw.get("model_type") in SPARSE
    moe = gated_delta.moe_config(fields, num_experts=256, experts_per_token=8) if sparse else None
    return gated_delta.model_config(
        fields,
        FAMILY.name,
        defaults=gated_delta.Defaults(
            vocab_size=248320,
            hidden=2048 if sparse else 4096,
            intermediate=12288,
            kv_heads=2 if sparse else 4,
        ),
        feed_forward=[MOE if sparse else MLP] * fields.integer("num_hidden_layers", 40 if sparse else 32),
        moe=moe,
        draft_layers=fields.integer("mtp_num_hidden_layers", 1),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Names as `Qwen3_5ForCausalLM` has them, or within a model that also sees; `mtp.*` as in Alibaba's checkpoints."""
    return gated_delta.weight_names(config, gated_delta.split, "model.language_model.", "model.")


FAMILY = Family(
    name="Qwen3.5",
    model_types=DENSE + SPARSE,
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=gated_delta.ignored,
)
