"""The model families, by `model_type`.

A family is how it reads config.json, and how its tensors are named. Those that share most are in one file.
"""

import dataclasses
import tomllib
from collections.abc import Container, Mapping
from importlib.resources import files
from typing import Any

from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.families import (
    bamba,
    kimi,
    lfm,
    mamba,
    minimax,
    mtp,
    nemotron_h,
    qwen3,
    recurrent_gemma,
    zamba2,
)
from mamba_jax.families.base import Family, HFSource
from mamba_jax.families.fields import OTHER_TOWERS, TEXT_PREFIXES, WRAPPER, other_towers, text_fields

FAMILIES: tuple[Family, ...] = (
    nemotron_h.FAMILY,
    bamba.BAMBA,
    bamba.GRANITE,
    bamba.FALCON_H1,
    mamba.MAMBA2_FAMILY,
    zamba2.FAMILY,
    qwen3.QWEN3_NEXT,
    qwen3.QWEN3_5,
    qwen3.LARA_MINI,
    lfm.LFM2_FAMILY,
    lfm.LFM3_FAMILY,
    qwen3.OLMO_HYBRID,
    kimi.KIMI_LINEAR,
    kimi.LING3,
    minimax.FAMILY,
    mamba.MAMBA1_FAMILY,
    mamba.JAMBA_FAMILY,
    recurrent_gemma.FAMILY,
)

_TABLE = tomllib.loads((files(__name__) / "unsupported.toml").read_text(encoding="utf-8"))
UNSUPPORTED: Mapping[str, tuple[str, str]] = {kind: (name, lacking) for kind, (name, lacking) in _TABLE.items()}
"""Recurrent models that are not supported, by the `model_type` of their config.json, and what they need."""

_REGISTERED: list[Family] = []


def register(family: Family) -> None:
    """Registers a family from outside of this package in this process.

    Raises:
        ValueError: its name, or one of its model types, is taken.
    """
    for known in _families():
        for taken in {known.name, *known.model_types} & {family.name, *family.model_types}:
            raise ValueError(f"family {family.name!r}: {taken!r} is taken by {known.name}")
    _REGISTERED.append(family)


def _families() -> tuple[Family, ...]:
    return (*FAMILIES, *_REGISTERED)


class UnknownModelType(ModelConfigError):
    """The config.json is of a model of no supported family."""


def get(model_type: str | None) -> Family:
    """Returns the family of a config.json's `model_type`.

    Raises:
        UnknownModelType: none of them; the message names the model, or lists the known ones.
    """
    for family in _families():
        if model_type in family.model_types:
            return family
    if model_type is not None and model_type in UNSUPPORTED:
        name, lacking = UNSUPPORTED[model_type]
        raise UnknownModelType(f"model_type {model_type!r} is not supported: {name} models need {lacking}")
    known = ", ".join(one for family in _families() for one in family.model_types)
    raise UnknownModelType(f"model_type {model_type!r} is not supported: known are {known}")


def family_of(config: HybridConfig) -> Family:
    """Returns the family that a config was made by."""
    return next(family for family in _families() if family.name == config.family)


def config_from_hf(raw: Mapping[str, Any]) -> HybridConfig:
    """Reads a config.json, or the text model's part of one. Absent fields have transformers' defaults.

    Raises:
        UnknownModelType: the model belongs to no known family.
        ModelConfigError: fields are wrong, or request something that is not supported.
    """
    if raw.get("model_type") is None and "ssm_cfg" in raw:
        raise UnknownModelType(
            "config.json has no model_type, but ssm_cfg: it is of state-spaces' own code; convert the checkpoint with "
            "transformers' convert_mamba2_ssm_checkpoint_to_pytorch.py (Mamba 1: convert_mamba_ssm_checkpoint_to_"
            "pytorch.py)"
        )
    raw = text_fields(raw)
    # A wrapper's own model may differ from the family that its text model names: Kimi K3 is not a Kimi Linear.
    wrapper = raw.get(WRAPPER)
    family = get(wrapper if wrapper in UNSUPPORTED else raw.get("model_type"))
    return mtp.with_added_mtp(_with_scaled_positions(family.config_from_hf(raw)), raw)


def _with_scaled_positions(config: HybridConfig) -> HybridConfig:
    """Extends the config's maximum context to the one that scaled rotary frequencies are made for, if longer."""
    attentions = (config.attention, config.windowed_attention, config.latent_attention)
    ropes = [attention.rope for attention in attentions if attention is not None and attention.rope is not None]
    longest = max((rope.positions for rope in ropes), default=0)
    if longest <= (config.max_position_embeddings or 0):
        return config
    return dataclasses.replace(config, max_position_embeddings=longest)


def weight_names(config: HybridConfig) -> dict[str, HFSource]:
    """Every parameter by its dotted path (as in `mamba_jax.model.parameters`), and where a checkpoint has it."""
    sources = family_of(config).weight_names(config)
    if config.mtp_pattern and "mtp.final_norm.weight" not in sources:
        sources |= mtp.added_weight_names(config)
    return sources | (mtp.own_tables(config) if config.mtp_pattern else {})


def ignored(config: HybridConfig) -> tuple[str, ...]:
    """Regular expressions (full match) of tensors that a checkpoint may carry and the model does not use."""
    tied = (r"lm_head\.weight",) if config.tie_word_embeddings else ()
    # Rotation tables follow from the config.
    return (*family_of(config).ignored(config), r".*\.rotary_emb\.inv_freq", *tied, OTHER_TOWERS)


def as_stored(config: HybridConfig, available: Container[str]) -> HybridConfig:
    """Adjusts a config to the tensors of a checkpoint: parts of the multi-token-prediction layer, and scales of keys
    and values.

    transformers drops that layer's tensors when it saves a model, but keeps the config fields that declare it. The
    layer may also have its own embedding and head.
    """
    config = _with_kv_scales(config, available)
    if not config.mtp_pattern:
        return config
    full = dataclasses.replace(config, own_mtp_embedding=True, own_mtp_head=True)
    there = {path for path, source in weight_names(full).items() if source.find(available)}
    if not any(path.startswith("mtp.") for path in there):
        return dataclasses.replace(config, mtp_pattern="")
    return dataclasses.replace(config, own_mtp_embedding=mtp.OWN_EMBEDDING in there, own_mtp_head=mtp.OWN_HEAD in there)


def _with_kv_scales(config: HybridConfig, available: Container[str]) -> HybridConfig:
    kinds = {name: one for name in ("attention", "windowed_attention") if (one := getattr(config, name)) is not None}
    if not kinds:
        return config
    scaled = {name: dataclasses.replace(one, kv_scales=True) for name, one in kinds.items()}
    full = dataclasses.replace(config, **scaled)
    scales = [source for path, source in weight_names(full).items() if path.endswith((".k_scale", ".v_scale"))]
    return full if any(source.find(available) for source in scales) else config
