"""Measures of a model's quality, and checks that the engine's features do not change its answers."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.tokenizer import Tokenizer
from mamba_jax.model import HybridModel
from mamba_jax.train.corpus import Document, problem_prompt, problem_text, read_documents, text_of
from serving.engine.llm import LLM
from serving.engine.requests.draft_stats import DraftStats
from serving.engine.requests.sampling_params import SamplingParams

WINDOW = 512
"""Tokens per scored window."""
CACHE_MODES = ("none", "align", "all")
DRAFTS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "MTP, K=1": {"speculative_method": "mtp", "num_speculative_tokens": 1, "adaptive_drafts": False},
    "MTP, K=3": {"speculative_method": "mtp", "num_speculative_tokens": 3, "adaptive_drafts": False},
    "n-gram, K=3": {"speculative_method": "ngram", "num_speculative_tokens": 3, "adaptive_drafts": False},
}
_RESULT = re.compile(r"####\s*(-?[\d.,]+)")
_BATCH = 8
TIE = 1e-3
"""Logits with a smaller difference are a tie in float32."""


@dataclass(frozen=True)
class FeatureCell:
    """One combination of features, run over all problems."""

    cache: str
    drafts: str
    right: list[int]
    """Indices of the problems that were answered correctly."""
    seconds: float
    tokens: int
    cached_tokens: int
    stats: DraftStats
    outputs: list[list[int]]

    @property
    def correct(self) -> int:
        return len(self.right)


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


def prompts_of(problems: Sequence[Document], shots: int) -> list[str]:
    """Returns the prompts for all problems after the first `shots`, each with these first ones as solved examples."""
    solved = "".join(problem_text(document) + "\n" for document in problems[:shots])
    return [solved + problem_prompt(document) for document in problems[shots:]]


def run_problems(
    llm: LLM,
    problems: Sequence[Document],
    *,
    shots: int = 0,
    max_tokens: int = 256,
    one_by_one: bool = False,
    salt: str | None = None,
) -> tuple[list[Any], float]:
    """Returns greedy answers to all problems after the first `shots`, and the seconds they took without compilation.

    With a new `salt`, the run does not use prefixes cached by earlier runs.
    """
    prompts = prompts_of(problems, shots)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    # Run all prompts first: towards the end fewer rows run, which needs other programs.
    first = prompts[:1] if one_by_one else prompts
    llm.generate(first, params, use_tqdm=False, cache_salt=f"compiling {salt}")
    start = time.perf_counter()
    if one_by_one:
        outputs = [llm.generate(prompt, params, use_tqdm=False, cache_salt=salt)[0] for prompt in prompts]
    else:
        outputs = llm.generate(prompts, params, cache_salt=salt)
    return outputs, time.perf_counter() - start


def run_cell(
    model: str, cache: str, drafts: str, problems: Sequence[Document], *, shots: int, flags: Mapping[str, Any]
) -> FeatureCell:
    """Runs the problems with one cache mode and one source of drafts."""
    llm = LLM(model, **{**flags, "mamba_cache_mode": cache, **DRAFTS[drafts]})
    outputs, seconds = run_problems(llm, problems, shots=shots)
    answers = [o.outputs[0].text for o in outputs]
    return FeatureCell(
        cache=cache,
        drafts=drafts,
        right=[i for i, p in enumerate(problems[shots:]) if is_correct(p, answers[i])],
        seconds=seconds,
        tokens=sum(len(o.outputs[0].token_ids) for o in outputs),
        cached_tokens=sum(o.num_cached_tokens or 0 for o in outputs),
        stats=total_stats(outputs),
        outputs=[[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs],
    )


def disagreements(model: HybridModel, one: FeatureCell, other: FeatureCell) -> tuple[int, int]:
    """Returns how many greedy outputs of two cells differ, and how many of these do not differ at a tie.

    Products of different shapes round differently. If two tokens' logits differ by less than `TIE`, both are right.
    """
    differ = sure = 0
    for a, b in zip(one.outputs, other.outputs, strict=True):
        if a == b:
            continue
        differ += 1
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if place is None:  # one output is a prefix of the other
            sure += 1
            continue
        logits = np.asarray(model(jnp.asarray([a[:place]])))[0, -1]
        sure += bool(abs(logits[a[place]] - logits[b[place]]) > TIE)
    return differ, sure


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
