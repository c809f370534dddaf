"""What an engine's policy for the number of drafts knows of its model and machine."""

from __future__ import annotations

import jax
from flax import nnx

from mamba_jax.model import HybridModel
from serving.config import EngineConfig
from serving.core import AdaptiveDrafts, DraftPolicy

_TOKENS_PER_PASS = {"cpu": 5.0}
"""Tokens whose arithmetic takes as long as reading the weights once. On two cores, four rows of a dot cost 1.5 to 2.2
times one row; see `benchmarks/drafts.py`."""
_ON_ACCELERATORS = 250.0
"""The ratio of arithmetic to memory bandwidth, in 16 bits, is 200 to 560 on the usual GPUs and TPUs."""


def draft_policy(config: EngineConfig, model: HybridModel, *, bytes_per_slot: int) -> DraftPolicy:
    """Always K drafts, or as many as are worth it.

    Args:
        config: `num_speculative_tokens` and `adaptive_drafts`.
        model: of which the weights' bytes are taken.
        bytes_per_slot: what each token that is fed writes beside what it computes.
    """
    drafts = config.num_speculative_tokens
    if not config.adaptive_drafts or not drafts:
        return DraftPolicy(drafts)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    passes = _TOKENS_PER_PASS.get(jax.default_backend(), _ON_ACCELERATORS)
    return AdaptiveDrafts(drafts, knee=1 / (1 / passes + bytes_per_slot / max(weights, 1)))
