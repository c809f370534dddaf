"""Comparison of log-probabilities from the engine with those from the training forward.

A trainer that learns from rollouts assumes that they are equal. The engine samples tokens at temperature 1. If d is the
difference between training's and serving's log-probability of a token, the mean of exp(d) - 1 - d estimates the KL
divergence (Schulman, 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.model import HybridModel
from mamba_jax.train.score import SCORE_OPTIONS, score, sequence_logprobs
from serving.engine.llm import LLM
from serving.engine.requests.sampling_params import SamplingParams

_CHUNK = 48
ARRANGEMENTS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"mamba_cache_mode": "none"},
    "prefix hits": {"mamba_cache_mode": "all"},
    "chunked prefill": {"mamba_cache_mode": "all", "max_num_batched_tokens": _CHUNK},
    "drafts (MTP, K=3), hits": {
        "mamba_cache_mode": "all", "speculative_method": "mtp", "num_speculative_tokens": 3, "adaptive_drafts": False,
    },
    "drafts (n-gram, K=3), hits, chunks": {
        "mamba_cache_mode": "all", "speculative_method": "ngram", "num_speculative_tokens": 3, "adaptive_drafts": False,
        "max_num_batched_tokens": _CHUNK,
    },
}  # fmt: skip
OTHER_SHAPES = "training, other shapes"
"""The training forward compared with itself, one sequence at a time: the effect of rounding alone."""


@dataclass(frozen=True)
class Agreement:
    """The result of one arrangement, over all sampled tokens."""

    arrangement: str
    tokens: int
    cached_tokens: int
    kl: float
    """KL divergence per token, in nats."""
    largest: float
    """The largest difference of two log-probabilities."""
    equal: int = 0
    """Number of tokens whose log-probabilities have the same bits (float32)."""

    @classmethod
    def of(cls, arrangement: str, served: np.ndarray, trained: np.ndarray, cached: int = 0) -> Agreement:
        """Compares log-probabilities of the same tokens."""
        difference = trained.astype(np.float64) - served.astype(np.float64)
        kl = float((np.expm1(difference) - difference).mean())
        equal = int((served.astype(np.float32) == trained.astype(np.float32)).sum())
        return cls(arrangement, difference.size, cached, kl, float(np.abs(difference).max()), equal)


def agreements(
    model: str, loaded: HybridModel, prompts: Sequence[Mapping[str, Any]], *, max_tokens: int, flags: Mapping[str, Any]
) -> list[Agreement]:
    """Returns the results of all arrangements that the model supports, then of the training forward compared with
    itself.

    Args:
        model: the reference that engines load.
        loaded: the same model in the same dtype.
        prompts: prompts for the engine; each is sampled twice, so that the second run has cache hits.
        max_tokens: maximum number of tokens per answer.
        flags: flags of all engines; with `schedule_invariant`, `mamba_jax.score` replaces the training forward.
    """
    results, compared = [], None
    run = _exact if flags.get("schedule_invariant") else _score
    for name, more in ARRANGEMENTS.items():
        if more.get("speculative_method") == "mtp" and loaded.mtp is None:
            continue
        llm = LLM(model, **flags, **more)
        rows, served, cached = [], [], 0
        for turn in range(2):
            params = [
                SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, seed=2 * i + turn)
                for i in range(len(prompts))
            ]
            for output in llm.generate(list(prompts), params, use_tqdm=False):
                (choice,) = output.outputs
                tables = choice.logprobs or []
                rows.append((output.prompt_token_ids, choice.token_ids))
                served += [table[token].logprob for token, table in zip(choice.token_ids, tables, strict=True)]
                cached += output.num_cached_tokens
        trained = _trained(run, loaded, rows, batch=8)
        results.append(Agreement.of(name, np.array(served), trained, cached))
        compared = compared or (rows, trained)
    assert compared is not None
    rows, trained = compared
    return [*results, Agreement.of(OTHER_SHAPES, _trained(run, loaded, rows, batch=1, pad=64), trained)]


def _trained(
    run: Any, model: HybridModel, rows: Sequence[tuple[list[int], list[int]]], *, batch: int, pad: int = 0
) -> np.ndarray:
    """Returns the training forward's log-probabilities of all answers' tokens, in batches padded to one length."""
    length = max(len(prompt) + len(answer) for prompt, answer in rows) + pad
    logprobs = []
    for start in range(0, len(rows), batch):
        piece = rows[start : start + batch]
        tokens, lengths = np.zeros((batch, length), np.int32), np.ones(batch, np.int32)
        for row, (prompt, answer) in enumerate(piece):
            lengths[row] = len(prompt) + len(answer)
            tokens[row, : lengths[row]] = [*prompt, *answer]
        scores = np.asarray(run(model, jnp.asarray(tokens), jnp.asarray(lengths)))
        for row, (prompt, answer) in enumerate(piece):
            logprobs.append(scores[row, len(prompt) - 1 : len(prompt) + len(answer) - 1])
    return np.concatenate(logprobs)


_score = jax.jit(sequence_logprobs)
_exact = jax.jit(score, compiler_options=SCORE_OPTIONS)
