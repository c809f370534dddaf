"""Multi-token-prediction layers: their parameters, and layers that were trained for a model of a family that has none
(`mamba-jax train-mtp`).

For the latter, config.json says, in NVIDIA's words,

    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-"

and the tensors are called `mtp.layers.N...`, as NVIDIA calls them: `enorm`, `hnorm` and `eh_proj` in the first
sublayer, `final_layernorm` in the last, `norm` and `mixer.*` in each. The sublayers are made like the model's own. A
model without MLPs of its own gets SwiGLU ones of `mtp_intermediate_size`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MLP, HybridConfig, MLPConfig, ModelConfigError
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource, placed, tensor
from mamba_jax.families.fields import Fields

LAYERS, PATTERN, SIZE = "num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_intermediate_size"
"""The fields of config.json."""
OWN_EMBEDDING, OWN_HEAD = "mtp.embed.weight", "mtp.lm_head.weight"
"""Paths of parameters that a layer may have of its own."""


def with_added_mtp(config: HybridConfig, raw: Mapping[str, Any]) -> HybridConfig:
    """Returns the config with the layer that config.json tells of, if it does.

    Several layers are left out and only counted: the model itself does not need them.

    Raises:
        ModelConfigError: sublayers that this model cannot have.
    """
    fields = Fields(raw)
    layers = fields.integer(LAYERS, 0)
    if layers > 1:
        return dataclasses.replace(config, mtp_pattern="", unused_mtp_layers=layers)
    if config.mtp_pattern or not layers:
        return config
    pattern = fields.text(PATTERN, "*-")
    if wrong := sorted(set(pattern) - {ATTENTION, MLP}):
        raise ModelConfigError(
            f"config field {PATTERN} is {pattern!r}: {wrong} cannot be added to a {config.family} model"
        )
    if ATTENTION in pattern and (config.attention is None or config.attention.input_size != config.hidden_size):
        raise ModelConfigError(
            f"config field {PATTERN} is {pattern!r}: a {config.family} model has no attention that could be added; "
            f"only {MLP!r} is possible"
        )
    mlp = config.mlp or MLPConfig(fields.integer(SIZE, 2 * config.hidden_size), "silu", gated=True)
    return dataclasses.replace(config, mtp_pattern=pattern, mlp=mlp)


def added_weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Returns the layer's parameters, and where a checkpoint has them, in NVIDIA's words."""
    last = len(config.mtp_pattern) - 1
    names = {"final_norm": f"{last}.final_layernorm", "enorm": "0.enorm", "hnorm": "0.hnorm", "eh_proj": "0.eh_proj"}
    return placed("mtp", parts.weights(names), "mtp.layers.") | sublayers(config, parts.mixers("NemotronH"), "norm")


def sublayers(config: HybridConfig, mixers: parts.Mixers, *norms: parts.Spelling) -> dict[str, HFSource]:
    """Returns the sublayers of the multi-token-prediction layer, where it is stored apart from the model's layers."""
    return parts.layers(config, mixers, norms, pattern=config.mtp_pattern, path="mtp.blocks", name="mtp.layers")


def own_tables(config: HybridConfig) -> dict[str, HFSource]:
    """Embedding and head of the multi-token-prediction layer, where it has its own."""
    sources = {}
    if config.own_mtp_embedding:
        sources[OWN_EMBEDDING] = tensor("mtp.embeddings.weight", "mtp.embed_tokens.weight")
    if config.own_mtp_head:
        sources[OWN_HEAD] = tensor("mtp.lm_head.weight")
    return sources


def unused(config: HybridConfig) -> tuple[str, ...]:
    """Returns patterns of the tensors of a multi-token-prediction layer, where the config has none."""
    return () if config.mtp_pattern else (r"mtp\..*",)
