"""Mamba-2 (Dao and Gu, 2024): Mamba2 mixers and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mamba_jax.config import HybridConfig, MambaConfig, ModelConfigError, need
from mamba_jax.families import parts
from mamba_jax.families.base import Family, HFSource, tensor
from mamba_jax.families.fields import Fields


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json of transformers' `Mamba2Config`."""
    fields = Fields(raw)
    fields.only("hidden_act", ("silu", "swish"))
    hidden, eps = fields.integer("hidden_size", 4096), fields.number("layer_norm_epsilon", 1e-5)
    bias = fields.flag("use_bias", False)
    low, high = fields.numbers("time_step_limit", (0.0, float("inf")))
    mamba = MambaConfig(
        num_heads=fields.integer("num_heads", 128),
        head_dim=fields.integer("head_dim", 64),
        state_size=fields.integer("state_size", 128),
        num_groups=fields.integer("n_groups", 8),
        conv_width=fields.integer("conv_kernel", 4),
        conv_bias=fields.flag("use_conv_bias", True),
        in_bias=bias,
        out_bias=bias,
        dt_limit=(low, high),
        norm_eps=eps,
    )
    expand = fields.number("expand", 2)
    if mamba.inner_size != expand * hidden:
        raise ModelConfigError(
            f"{mamba.num_heads} heads of {mamba.head_dim} do not make expand * hidden_size = {expand:g} * {hidden}"
        )
    return HybridConfig(
        family=FAMILY.name,
        vocab_size=fields.integer("vocab_size", 32768),
        hidden_size=hidden,
        pattern="M" * fields.integer("num_hidden_layers", 64),
        norm_eps=eps,
        mamba=mamba,
        residual_in_fp32=fields.flag("residual_in_fp32", True),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        bos_token_id=fields.token("bos_token_id", 0),
        eos_token_ids=fields.tokens("eos_token_id", 2),
    )


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns names as `Mamba2ForCausalLM` has them."""

    def mixer(path: str, name: str) -> dict[str, HFSource]:
        return parts.mamba(path, name, need(config.mamba), config.hidden_size)

    return backbone(config, mixer)


def backbone(config: HybridConfig, mixer: Callable[[str, str], dict[str, HFSource]]) -> dict[str, HFSource]:
    """Returns names of a model of recurrent layers alone, as both versions of Mamba have them.

    `mixer` maps a mixer's path and its name in checkpoints to its parameters.
    """
    body: dict[str, HFSource] = {}
    for i in range(len(config.pattern)):
        body[f"blocks.{i}.norm.weight"] = tensor(f"layers.{i}.norm.weight")
        body |= mixer(f"blocks.{i}.mixer", f"layers.{i}.mixer")
    sources = parts.whole_model(
        config, body, embed="embeddings.weight", norm="norm_f.weight", prefixes=("backbone.", "model.")
    )
    # The reference code's own checkpoints say "embedding".
    sources["embed.weight"] = tensor(
        "backbone.embeddings.weight", "model.embeddings.weight", "backbone.embedding.weight"
    )
    return sources


FAMILY = Family(
    name="Mamba2",
    model_types=("mamba2",),
    config_from_hf=config_from_hf,
    weight_names=weight_names,
    ignored=parts.always_ignored,
)
