"""Comparison of log-probabilities from the engine with those from the training forward.

    python -m benchmarks.consistency --model demo
    python -m benchmarks.consistency --schedule-invariant

A trainer that learns from rollouts assumes that they are equal. The engine samples tokens at temperature 1. If d is the
difference between training's and serving's log-probability of a token, the mean of exp(d) - 1 - d estimates the KL
divergence (Schulman, 2020).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from checkpoints.load import load_config, load_model
from checkpoints.resolve import resolve
from checkpoints.tokenizer import require_tokenizer
from mamba_jax.model import HybridModel
from mamba_jax.train.corpus import SAMPLE_TEXT, read_documents
from mamba_jax.train.score import SCORE_OPTIONS, check_score, score, sequence_logprobs
from serving.cli.measures import text_prompts
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a table in float32 and one in bfloat16."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint directory, or 'demo'")
    parser.add_argument("--data", type=Path, help="folder with heldout_text.jsonl; unset: the model's")
    parser.add_argument("--prompts", type=int, default=40, help="number of text prompts")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="maximum number of sequences that run at once")
    parser.add_argument("--schedule-invariant", action="store_true", help="engines and score of that mode")
    parser.add_argument("--output", type=Path, help="JSON file to write all figures to")
    options = parser.parse_args(arguments)
    if options.output is not None and options.output.exists():
        parser.error(f"--output {options.output}: exists; give another file")
    if options.schedule_invariant:
        described = load_config(options.model)
        try:
            check_score(described)
        except ValueError as error:
            parser.error(f"--schedule-invariant: {error}")
    model, texts = options.model, read_documents((options.data or resolve(options.model).files) / SAMPLE_TEXT)
    prompts = text_prompts(require_tokenizer(model), list(texts), options.prompts)
    figures: dict[str, Any] = {"model": model}
    for dtype in ("float32", "bfloat16"):
        flags = {
            "dtype": dtype, "max_num_seqs": options.max_num_seqs, "max_model_len": 512, "warmup": False,
            "tile_size": 32, "state_block_size": 64, "schedule_invariant": options.schedule_invariant,
        }  # fmt: skip
        table = Table(title=f"{model}, {dtype}: serving against training, per token")
        for heading in ("arrangement", "tokens", "cached tokens", "KL (nats)", "largest difference", "equal bits"):
            table.add_column(heading, justify="left" if heading == "arrangement" else "right")
        loaded = load_model(model, dtype=dtype, progress=False)
        found = agreements(model, loaded, prompts, max_tokens=64, flags=flags)
        for one in found:
            counts = f"{one.tokens}", f"{one.cached_tokens}", f"{one.kl:.1e}", f"{one.largest:.1e}"
            table.add_row(one.arrangement, *counts, f"{one.equal} of {one.tokens}")
        Console(soft_wrap=True, highlight=False).print(table)
        figures[dtype] = [dataclasses.asdict(one) for one in found]
    if options.output is not None:
        options.output.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
