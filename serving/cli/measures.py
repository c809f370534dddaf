"""Measures of a model's quality: bits per byte, exact answers, acceptance of drafts, and distance to another model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from checkpoints.tokenizer import Tokenizer
from mamba_jax.model import HybridModel
from mamba_jax.train.corpus import Document, text_of
from mamba_jax.train.score import sequence_logprobs
from serving.engine.stats import DraftStats, added

WINDOW = 512
"""Tokens per scored window."""
MTP_DRAFTS: Mapping[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 3, "adaptive_drafts": False}
_RESULT = re.compile(r"####\s*(-?[\d.,]+)")
_BATCH = 8
_logprobs = jax.jit(sequence_logprobs)


def bits_per_byte(model: HybridModel, tokenizer: Tokenizer, documents: Iterable[Document]) -> float:
    """Bits of information per byte of UTF-8 text under the model.

    Documents are cut into windows of `WINDOW` tokens; each is scored separately after the bos token.
    """
    windows: list[list[int]] = []
    size = 0
    for document in documents:
        text = text_of(document)
        size += len(text.encode())
        ids = tokenizer.encode(text, add_special_tokens=False)
        windows += [ids[start : start + WINDOW] for start in range(0, len(ids), WINDOW)]
    windows.sort(key=len)
    bos = 0 if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    nats = 0.0
    for start in range(0, len(windows), _BATCH):
        tokens, lengths = np.zeros((_BATCH, 1 + WINDOW), np.int32), np.ones(_BATCH, np.int32)
        for row, window in enumerate(windows[start : start + _BATCH]):
            lengths[row] += len(window)
            tokens[row, : lengths[row]] = [bos, *window]
        scored = np.arange(1, 1 + WINDOW) < lengths[:, None]
        nats -= float(np.asarray(_logprobs(model, tokens, lengths))[scored].sum())
    return nats / math.log(2) / max(size, 1)


def result_of(answer: str) -> str | None:
    """Returns the number after the first `####` of an answer, in its shortest spelling; None if it has no number."""
    result = _RESULT.search(answer)
    return None if result is None else plain_number(result[1])


def plain_number(text: str) -> str:
    """Returns a number without separators, and without a fraction of zero."""
    text = text.strip().rstrip(".").replace(",", "")
    return text.rstrip("0").rstrip(".") if "." in text else text


def is_correct(document: Document, answer: str) -> bool:
    """Returns whether an answer has exactly the problem's result."""
    return result_of(answer) == plain_number(document["result"])


def text_prompts(
    tokenizer: Tokenizer, documents: Sequence[Document], count: int, length: int = 128
) -> list[dict[str, list[int]]]:
    """Returns the prompts of held-out text, evenly spaced: the bos token and `length` tokens each."""
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    pieces = []
    for document in documents:
        ids = tokenizer.encode(text_of(document), add_special_tokens=False)
        pieces += [bos + ids[start : start + length] for start in range(0, len(ids) - length + 1, 4 * length)]
    chosen = np.unique(np.linspace(0, len(pieces) - 1, min(count, len(pieces))).astype(int))
    return [{"prompt_token_ids": pieces[i]} for i in chosen]


def total_stats(outputs: Iterable[Any]) -> DraftStats:
    """Returns the sum of the draft counters of several requests."""
    return DraftStats(**(added([asdict(output.metrics.drafts) for output in outputs]) or {}))


@dataclass(frozen=True)
class Comparison:
    """A model compared with a reference, over the tokens of a text."""

    tokens: int
    kl: float
    """Kullback-Leibler divergence of the reference's distribution from the model's: mean over all tokens, in nats."""
    largest_kl: float
    """Largest divergence of one token, in nats."""
    agreement: float
    """Fraction of tokens after which both models have the same likeliest token."""
    nats: float
    """Negative log-likelihood of the next token under the model, in nats: mean over all tokens."""
    reference_nats: float
    """The same under the reference."""


def compare(
    model: HybridModel, reference: HybridModel, tokens: Sequence[int], *, window: int = 512, batch: int = 4
) -> Comparison:
    """Compares the predictions of two models with the same vocabulary.

    Args:
        model: the model to evaluate.
        reference: the reference model.
        tokens: the text; it is cut into windows, and each is predicted separately.
        window: tokens per window.
        batch: windows per batch.
    Raises:
        ValueError: the vocabularies have different sizes, or the text has fewer than two tokens.
    """
    if model.config.vocab_size != reference.config.vocab_size:
        raise ValueError(
            f"vocabularies of {model.config.vocab_size} and {reference.config.vocab_size} tokens cannot be compared"
        )
    if len(tokens) < 2:
        raise ValueError(f"the text has {len(tokens)} tokens; at least 2 are needed")
    window = min(window, len(tokens))
    count = -(-len(tokens) // window)
    rows = np.zeros((-(-count // batch) * batch, window), np.int32)
    rows.reshape(-1)[: len(tokens)] = tokens
    lengths = np.clip(len(tokens) - window * np.arange(len(rows)), 0, window)
    parts = [
        jax.device_get(_compare(model, reference, rows[i : i + batch], lengths[i : i + batch]))
        for i in range(0, len(rows), batch)
    ]
    kl, agree, own, other = (np.concatenate([part[n] for part in parts]) for n in range(4))
    present = np.arange(window) < lengths[:, None]
    followed = present[:, 1:]
    return Comparison(
        tokens=len(tokens),
        kl=float(kl[present].mean()),
        largest_kl=float(kl[present].max()),
        agreement=float(agree[present].mean()),
        nats=float(own[followed].mean()),
        reference_nats=float(other[followed].mean()),
    )


@jax.jit
def _compare(
    model: HybridModel, reference: HybridModel, tokens: Int[Array, "batch window"], lengths: Int[Array, " batch"]
) -> tuple[Float[Array, "batch _"], ...]:
    """Returns divergence and agreement for each token, and both models' negative log-likelihoods for each next
    token."""
    own, right = (jax.nn.log_softmax(each(tokens, lengths)) for each in (model, reference))
    divergence = (jnp.exp(right) * (right - own)).sum(-1)
    agree = (own.argmax(-1) == right.argmax(-1)).astype(jnp.float32)
    next_token = tokens[:, 1:, None]
    surprise = [-jnp.take_along_axis(each[:, :-1], next_token, axis=-1)[..., 0] for each in (own, right)]
    return divergence, agree, surprise[0], surprise[1]
