"""Measures of a model's quality: bits per byte, exact answers, acceptance of drafts."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.tokenizer import Tokenizer
from mamba_jax.model import HybridModel
from mamba_jax.train.corpus import Document, read_documents, text_of
from serving.engine.stats import DraftStats

WINDOW = 512
"""Tokens per scored window."""
MTP_DRAFTS: Mapping[str, Any] = {"speculative_method": "mtp", "num_speculative_tokens": 3, "adaptive_drafts": False}
_RESULT = re.compile(r"####\s*(-?[\d.,]+)")
_BATCH = 8


def read_some(path: Path, count: int | None) -> list[Document]:
    """Returns the first documents of a file; all of them if `count` is None."""
    documents = list(read_documents(path))
    return documents if count is None else documents[:count]


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
    nats = sum(_nats(model, windows[i : i + _BATCH], bos) for i in range(0, len(windows), _BATCH))
    return nats / math.log(2) / size


def _nats(model: HybridModel, windows: Sequence[Sequence[int]], bos: int) -> float:
    tokens = np.zeros((_BATCH, WINDOW + 1), np.int32)
    lengths = np.zeros(_BATCH, np.int32)
    for row, window in enumerate(windows):
        tokens[row, : len(window) + 1] = [bos, *window]
        lengths[row] = len(window)
    return float(_negative_log_likelihood(model, jnp.asarray(tokens), jnp.asarray(lengths)))


@jax.jit
def _negative_log_likelihood(model: HybridModel, tokens: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns the sum over all tokens of a batch except the first of each row."""
    scores = jax.nn.log_softmax(model(tokens[:, :-1], lengths))
    taken = jnp.take_along_axis(scores, tokens[:, 1:, None], axis=-1)[..., 0]
    return -jnp.where(jnp.arange(tokens.shape[1] - 1) < lengths[:, None], taken, 0).sum()


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
    total = DraftStats()
    for one in (output.metrics.drafts for output in outputs):
        total.steps += one.steps
        for place, (drafted, accepted) in enumerate(zip(one.drafted_at, one.accepted_at, strict=True)):
            if place == len(total.drafted_at):
                total.drafted_at.append(0)
                total.accepted_at.append(0)
            total.drafted_at[place] += drafted
            total.accepted_at[place] += accepted
    return total
