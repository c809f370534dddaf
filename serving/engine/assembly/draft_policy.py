"""The policy for the number of drafts, from the sizes of the model and the speed of the machine."""

from __future__ import annotations

from typing import NamedTuple

import jax
from flax import nnx

from mamba_jax.model import HybridModel
from serving.config import EngineConfig
from serving.core import AdaptiveDrafts, DraftPolicy


class _Machine(NamedTuple):
    tokens_per_pass: float
    """Number of tokens with arithmetic that takes as long as reading the weights once."""
    overhead: float
    """Fixed time of a step, as the number of bytes that could be read in this time."""


_CPU = _Machine(5.0, 3e7)
"""Two cores, on which four rows of a dot cost 1.5 to 2.2 times one row (benchmarks/RESULTS.md); 1 ms at 30 GB/s."""
_ACCELERATOR = _Machine(250.0, 1e9)
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
    machine = _CPU if jax.default_backend() == "cpu" else _ACCELERATOR
    token = weights / machine.tokens_per_pass + bytes_per_token
    return AdaptiveDrafts(drafts, knee=(weights + machine.overhead) / token)
