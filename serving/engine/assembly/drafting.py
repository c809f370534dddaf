"""Chooses the draft source of an engine."""

from __future__ import annotations

import jax

from checkpoints.drafter import load_drafter_config
from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import BlockConfig, DrafterConfig
from mamba_jax.drafts import BlockDrafts, DraftSource, MTPCache, MTPDrafts, NGramDrafts
from serving.config import DRAFTER_METHODS, ConfigError, EngineConfig


def with_drafter_config(config: EngineConfig, model: HybridConfig) -> HybridConfig:
    """Returns the model with the drafter of `speculative_model`, if the flag is set.

    Raises:
        CheckpointError: there is no such drafter, or it does not fit the model.
    """
    if config.speculative_model is None or not config.num_speculative_tokens:
        return model
    return load_drafter_config(config.speculative_model, model, method=config.speculative_method)


def draft_source(config: EngineConfig, model: HybridConfig) -> DraftSource | None:
    """Returns the draft source for a model; None without drafts.

    Raises:
        ConfigError: the model does not have the layers that the method needs, or a flag does not support its drafter.
    """
    if not config.num_speculative_tokens:
        return MTPCache() if config.keep_draft_kv and model.mtp_pattern else None
    own = "mtp" if model.drafter is None else model.drafter.method
    method = config.speculative_method or (own if model.drafts else "ngram")
    if method == "ngram":
        low, high = config.ngram_bounds
        return NGramDrafts(low, high)
    if method in DRAFTER_METHODS:
        drafter = _checked_drafter(config, model, method)
        if isinstance(drafter, BlockConfig):
            return BlockDrafts(drafter.mask_token, drafter.from_newest)
        return MTPDrafts()
    if not model.mtp_pattern and model.unused_mtp_layers:
        raise ConfigError(
            f"speculative_method 'mtp': {config.model} has {model.unused_mtp_layers} multi-token-prediction layers, "
            "of which only a single one could be used; try 'ngram'"
        )
    if not model.mtp_pattern:
        raise ConfigError(f"speculative_method 'mtp': {config.model} has no multi-token-prediction layer; try 'ngram'")
    return MTPDrafts()


def _checked_drafter(config: EngineConfig, model: HybridConfig, method: str) -> DrafterConfig:
    """Returns the model's drafter. Raises `ConfigError` if it has none of this kind, or flags do not support one."""
    if model.drafter is None or model.drafter.method != method:
        raise ConfigError(f"speculative_method {method!r} needs speculative_model, a drafter's directory")
    if jax.process_count() > 1:
        raise ConfigError("speculative_model is not supported on several hosts; use one host")
    if config.host_cache_gib or config.disk_cache:
        raise ConfigError("host_cache_gib and disk_cache do not support speculative_model; use mtp or ngram drafts")
    return model.drafter
