"""The model families, and what belongs to a `model_type`.

A family is one small file here: how it reads config.json, and how its tensors are named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from mamba_jax.config import ConfigError, HybridConfig
from mamba_jax.families import bamba, falcon_h1, granite, mamba2, nemotron_h, zamba2
from mamba_jax.families.added_mtp import added_weight_names, with_added_mtp
from mamba_jax.families.base import Family, HFSource

__all__ = [
    "FAMILIES",
    "Family",
    "HFSource",
    "UnknownModelType",
    "config_from_hf",
    "family_of",
    "get",
    "weight_names",
    "without_absent_parts",
]

FAMILIES: tuple[Family, ...] = (
    nemotron_h.FAMILY,
    bamba.FAMILY,
    granite.FAMILY,
    falcon_h1.FAMILY,
    mamba2.FAMILY,
    zamba2.FAMILY,
)


class UnknownModelType(ConfigError):
    """A config.json of a model that is none of our families."""


def get(model_type: str | None) -> Family:
    """The family of a config.json's `model_type`.

    Raises:
        UnknownModelType: none of them; the message lists the known ones.
    """
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(one for family in FAMILIES for one in family.model_types)
    raise UnknownModelType(f"model_type {model_type!r} is not supported: known are {known}")


def family_of(config: HybridConfig) -> Family:
    """The family that a config was made by."""
    return next(family for family in FAMILIES if family.name == config.family)


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json. Absent fields have transformers' defaults.

    Raises:
        UnknownModelType: a model that is none of our families.
        ConfigError: wrong fields, or such as ask for something that is not supported.
    """
    family = get(raw.get("model_type"))
    if raw.get("quantization_config"):
        raise ConfigError("quantized checkpoints (config field quantization_config) are not supported yet")
    return with_added_mtp(family.config_from_hf(raw), raw)


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Every parameter by its dotted path (as in `mamba_jax.model.parameters`), and where a checkpoint has it."""
    sources = family_of(config).weight_names(config)
    if config.mtp_pattern and "mtp.final_norm.weight" not in sources:
        sources |= added_weight_names(config)
    return sources


def without_absent_parts(config: HybridConfig, available: Container[str]) -> HybridConfig:
    """The config without what a checkpoint may leave out and this one does: the multi-token-prediction layer.

    transformers drops that layer's tensors when it saves a model, but keeps the config fields that ask for it.
    """
    if not config.mtp_pattern:
        return config
    drafting = (source for path, source in weight_names(config).items() if path.startswith("mtp."))
    if any(source.find(available) for source in drafting):
        return config
    return dataclasses.replace(config, mtp_pattern="")
