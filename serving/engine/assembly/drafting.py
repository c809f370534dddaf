"""Chooses the draft source of an engine, and the policy for the number of drafts."""

from __future__ import annotations

import jax
from flax import nnx

from checkpoints.drafts import load_drafter_config
from mamba_jax.config import HybridConfig
from mamba_jax.config.drafter import BlockConfig
from mamba_jax.drafts import BlockDrafts, DraftSource, MTPCache, MTPDrafts, NGramDrafts
from mamba_jax.model import HybridModel
from serving.config import DRAFTER_METHODS, ConfigError, EngineConfig
from serving.core.requests.drafts import LEAST_CHANCE, AdaptiveDrafts, DraftPolicy


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
        drafter = model.drafter
        if drafter is None or drafter.method != method:
            raise ConfigError(f"speculative_method {method!r} needs speculative_model, a drafter's directory")
        if isinstance(drafter, BlockConfig):
            least = LEAST_CHANCE if config.adaptive_drafts else 0.0
            return BlockDrafts(drafter.mask_token, drafter.from_newest, least)
        return MTPDrafts()
    if not model.mtp_pattern and model.unused_mtp_layers:
        raise ConfigError(
            f"speculative_method 'mtp': {config.model} has {model.unused_mtp_layers} multi-token-prediction layers, "
            "of which only a single one could be used; try 'ngram'"
        )
    if not model.mtp_pattern:
        raise ConfigError(f"speculative_method 'mtp': {config.model} has no multi-token-prediction layer; try 'ngram'")
    return MTPDrafts()


# The number of tokens whose arithmetic takes as long as reading the weights once, and the fixed time of a step, as the
# number of bytes that could be read in it.
_CPU = 5.0, 3e7
"""Two cores, on which four rows of a dot cost 1.5 to 2.2 times one row (benchmarks/RESULTS.md); 1 ms at 30 GB/s."""
_ACCELERATOR = 250.0, 1e9
"""Arithmetic over memory bandwidth, in 16 bits, is 200 to 560 on the usual GPUs and TPUs; 0.3 ms at 3 TB/s."""


def draft_policy(config: EngineConfig, model: HybridModel, *, bytes_per_token: float) -> DraftPolicy:
    """Returns the policy: always K drafts, or with `adaptive_drafts` the number that gives the most tokens per second.

    Args:
        config: `num_speculative_tokens` and `adaptive_drafts`.
        model: the model, which determines the bytes of weights.
        bytes_per_token: bytes of state that each fed token writes.
    """
    drafts = config.num_speculative_tokens
    if not config.adaptive_drafts or not drafts:
        return DraftPolicy(drafts)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    tokens_per_pass, overhead = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    knee = (weights + overhead) / (weights / tokens_per_pass + bytes_per_token)
    return AdaptiveDrafts(drafts, knee=knee)
