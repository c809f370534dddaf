"""Qwen3-Next (Alibaba, 2025): three gated delta nets to one gated attention, each followed by a mixture of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mamba_jax.config import MLP, MOE, HybridConfig
from mamba_jax.families import gated_delta
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `Qwen3NextConfig`."""
    fields = Fields(raw)
    fields.only("norm_topk_prob", (True,))
    layers, step = fields.integer("num_hidden_layers", 48), fields.integer("decoder_sparse_step", 1)
    moe = gated_delta.moe_config(fields, num_experts=512, experts_per_token=10)
    dense = set(range(layers)) if moe is None else set(fields.integers("mlp_only_layers", []))
    return gated_delta.model_config(
        fields,
        FAMILY.name,
        defaults=gated_delta.Defaults(vocab_size=151936, hidden=2048, intermediate=5632, kv_heads=2),
        feed_forward=[MLP if i in dense or (i + 1) % step else MOE for i in range(layers)],
        moe=moe,
        # Published with one such layer, and without this field.
        draft_layers=fields.integer("num_nextn_predict_layers", 1),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Qwen3NextForCausalLM` has them; `mtp.*` as Alibaba's checkpoints have it."""
    return gated_delta.weight_names(config, gated_delta.fused, "model.")


FAMILY = Family(
    name="Qwen3Next",
    model_types=("qwen3_next",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=gated_delta.ignored,
)
