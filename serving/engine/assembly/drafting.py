"""Chooses the draft source of an engine."""

from __future__ import annotations

from mamba_jax.config import HybridConfig
from mamba_jax.drafts import DraftSource, MTPCache, MTPDrafts, NGramDrafts
from serving.config import ConfigError, EngineConfig


def draft_source(config: EngineConfig, model: HybridConfig) -> DraftSource | None:
    """Returns the draft source for a model; None without drafts.

    Raises:
        ConfigError: the model does not have the layers that the method needs.
    """
    if not config.num_speculative_tokens:
        return MTPCache() if config.keep_draft_kv and model.mtp_pattern else None
    method = config.speculative_method or ("mtp" if model.mtp_pattern else "ngram")
    if method == "ngram":
        low, high = config.ngram_bounds
        return NGramDrafts(low, high)
    if not model.mtp_pattern and model.unused_mtp_layers:
        raise ConfigError(
            f"speculative_method 'mtp': {config.model} has {model.unused_mtp_layers} multi-token-prediction layers, "
            "of which only a single one could be used; try 'ngram'"
        )
    if not model.mtp_pattern:
        raise ConfigError(f"speculative_method 'mtp': {config.model} has no multi-token-prediction layer; try 'ngram'")
    return MTPDrafts()
