"""A multi-token-prediction layer that was trained for a model of a family that has none (`mamba-jax train-mtp`).

config.json then says, in NVIDIA's words,

    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*-"

and the tensors are called `mtp.layers.N...`, as NVIDIA calls them: `enorm`, `hnorm` and `eh_proj` in the first
sublayer, `final_layernorm` in the last, `norm` and `mixer.*` in each. The sublayers are made like the model's own. A
model without MLPs of its own gets SwiGLU ones of `mtp_intermediate_size`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from mamba_jax.config import ATTENTION, MLP, HybridConfig, MLPConfig, ModelConfigError
from mamba_jax.families import parts
from mamba_jax.families.base import HFSource
from mamba_jax.families.fields import Fields

LAYERS, PATTERN, SIZE = "num_nextn_predict_layers", "mtp_hybrid_override_pattern", "mtp_intermediate_size"
"""The fields of config.json."""


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
    """Returns the layer's parameters, and where a checkpoint has them."""
    mixers: parts.Mixers = {ATTENTION: ("mixer", parts.attention), MLP: ("mixer", parts.mlp)}
    return parts.draft_layer_frame(config) | parts.draft_layers(config, mixers, "norm")
