"""Outputs: a `RequestOutput` per request and a `CompletionOutput` per choice, with vLLM's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8

from mamba_jax.store import Store
from serving.core.errors import RequestError, RequestFailed
from serving.core.planning.plan import Row
from serving.core.requests.request import ResultDisposition
from serving.engine.stats import DraftStats

_PAGES = 64
"""Pages that one call reads, so that only one program is compiled."""


@dataclass(frozen=True)
class RoutedExperts:
    """The experts of a sequence's tokens, on the device until `numpy` is called."""

    pieces: tuple[Int[Array, "pages page_size 1 choices"], ...]
    num_tokens: int
    per_layer: int
    """Experts of a token in one layer."""

    def numpy(self) -> Int[np.ndarray, "tokens layers chosen"]:
        """Returns the numbers of the experts. Waits for the device if necessary."""
        rows = np.concatenate([np.asarray(piece).reshape(-1, piece.shape[-1]) for piece in self.pieces])
        return rows[: self.num_tokens].reshape(self.num_tokens, -1, self.per_layer)


def read_routed_experts(store: Store, row: Row, num_tokens: int, *, per_layer: int) -> RoutedExperts | None:
    """Reads the experts of a request's first tokens, without waiting for the device.

    Call this when its last row is settled: a step that is dispatched later may write its pages.

    Args:
        store: a store that records experts.
        row: the row whose tokens ended the request.
        num_tokens: number of tokens.
        per_layer: experts of a token in one layer.

    Returns:
        None if the request lost its pages while the row was in flight, because it was preempted.
    """
    if row.fate is ResultDisposition.DETACHED:
        return None
    experts, pages = store.experts, row.pages
    assert experts is not None
    count = -(-num_tokens // store.page_size)
    pieces = []
    for start in range(0, count, _PAGES):
        ids = np.zeros(_PAGES, np.int32)
        part = pages[start : min(start + _PAGES, count)]
        ids[: len(part)] = part
        pieces.append(_read(experts, ids))
        pieces[-1].copy_to_host_async()
    return RoutedExperts(tuple(pieces), num_tokens, per_layer)


@jax.jit
def _read(
    experts: Int[Array, "pages page_size 1 choices"], ids: Int[Array, " n"]
) -> Int[Array, "n page_size 1 choices"]:
    return experts[ids]


class Logprob(NamedTuple):
    """Log-probability of one token: under the model's own distribution or, for output tokens and with
    `logprobs_mode="processed_logprobs"`, under the distribution that tokens are sampled from."""

    logprob: float
    rank: int | None
    """1 = the likeliest; None if the token is not among the requested alternatives."""
    decoded_token: str | None = None
    """The token's text, in outputs of `LLM.generate` and `LLM.chat` with text."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities of one position by token id: the chosen token first, then the likeliest ones."""


class PromptScores(Sequence[TokenLogprobs | None]):
    """The log-probabilities of a prompt: a table for each token, None for the first.

    Arrays hold the values. A table is made when it is read: all together would take a hundred times the memory.

    Args:
        token_ids: the prompt.
        top: number of likeliest tokens at each position.
        ids: further tokens at each position.
    """

    def __init__(self, token_ids: Sequence[int], top: int, ids: Sequence[int]) -> None:
        self._token_ids, self._ids = token_ids, ids
        self._known = np.zeros(len(token_ids), bool)
        self._own = np.zeros(len(token_ids), np.float32)
        self._top_ids = np.zeros((len(token_ids), top), np.int32)
        self._top = np.zeros((len(token_ids), top), np.float32)
        self._of_ids = np.zeros((len(token_ids), len(ids)), np.float32)
        self.text_of: Callable[[int], str] | None = None
        """Returns a token's text, for `decoded_token`."""

    def fill(
        self,
        begin: int,
        own: Float[np.ndarray, " n"],
        top_ids: Int[np.ndarray, "n top"],
        top: Float[np.ndarray, "n top"],
        of_ids: Float[np.ndarray, "n ids"],
    ) -> None:
        """Sets the log-probabilities of the tokens from `begin` on, of the likeliest ones, and of `ids`."""
        to, (_, most), given = slice(begin, begin + len(own)), self._top.shape, len(self._ids)
        self._known[to], self._own[to] = True, own
        self._top_ids[to], self._top[to], self._of_ids[to] = top_ids[:, :most], top[:, :most], of_ids[:, :given]

    def __len__(self) -> int:
        return len(self._token_ids)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return [self[at] for at in range(len(self))[place]]
        at = range(len(self))[place]
        if not self._known[at]:
            return None
        table = token_logprobs(self._token_ids[at], float(self._own[at]), self._top_ids[at], self._top[at])
        for token, value in zip(self._ids, self._of_ids[at].tolist(), strict=True):
            table.setdefault(token, Logprob(value, None))
        return table if self.text_of is None else with_texts(table, self.text_of)


@dataclass
class RequestMetrics:
    """Times of a request's events, in seconds of `time.monotonic`."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    drafts: DraftStats = field(default_factory=DraftStats)
    """Counters of the drafts of all choices."""

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival until the host received the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass
class CompletionOutput:
    """One choice of a request. In a delta, `text`, `token_ids` and `logprobs` are the new ones; all other fields are
    those of the whole choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    """Sum over the output tokens; only if `logprobs` was requested."""
    finish_reason: str | None = None
    """`stop`, `length`, `abort`, or None while it runs."""
    stop_reason: int | str | None = None
    """The stop id or stop text that ended it; None for end-of-sequence."""
    weights_versions: list[tuple[str, int]] = field(default_factory=list)
    """The weights that produced the tokens: (version, number of tokens), in order. One entry unless they changed."""

    sampling_masks: list[np.ndarray] | None = field(default=None, repr=False)
    """What `sampling_mask` returns: one array [bytes] for each token; only if `return_sampling_mask` was requested."""
    recorded_experts: RoutedExperts | None = field(default=None, repr=False)
    """What `routed_experts` returns, perhaps still on the device."""

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.finish_reason is not None

    @property
    def routed_experts(self) -> Int[np.ndarray, "tokens layers chosen"] | None:
        """The experts that each token of prompt and output went through, in every layer with experts.

        The last token of the output has none, because the model has not read it. None while the choice runs, without
        the flag `enable_return_routed_experts`, and for a choice that was aborted or preempted in its last step.
        """
        return None if self.recorded_experts is None else self.recorded_experts.numpy()

    @property
    def sampling_mask(self) -> UInt8[np.ndarray, "tokens bytes"] | None:
        """The tokens that each output token could have been: those left by masks, biases, `top_k`, `top_p` and `min_p`.

        Bit i % 8 of byte i // 8 is token i; `unpack_sampling_mask` returns a boolean for each token of the vocabulary.
        None unless `return_sampling_mask` was requested, and before the first token.
        """
        return np.stack(self.sampling_masks) if self.sampling_masks else None

    def extend(self, new: CompletionOutput) -> None:
        """Appends a delta."""
        text, tokens, logprobs = self.text + new.text, self.token_ids, self.logprobs
        tokens += new.token_ids
        if logprobs is not None:
            logprobs += new.logprobs or ()
        vars(self).update(vars(new), text=text, token_ids=tokens, logprobs=logprobs)


@dataclass
class RequestOutput:
    """The output of a request: all of it so far or, from a request with `live`, a delta.

    A delta has only choices with new output, and the first delta has all. Outputs of one request share values other
    than those of their choices: copy values that must not change.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    """Number of prompt tokens that were in the prefix cache and not computed."""
    cache_write_tokens: dict[float | None, int] = field(default_factory=dict)
    """Number of prompt tokens that were added to the prefix cache up to the request's marks, by the marks' `ttl`."""
    miss_reason: str | None = None
    """Why no part of the prompt came from the cache; None if a part came from it."""
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None
    """One entry per prompt token; None for the first."""
    metrics: RequestMetrics | None = None
    failure: RequestError | RequestFailed | None = None
    """Why the request failed, if it did; its choices then have finish reason `error`."""

    def extend(self, new: RequestOutput) -> RequestOutput:
        """Appends a delta, whose values it then owns. Returns itself."""
        choices = {choice.index: choice for choice in self.outputs}
        for choice in new.outputs:
            if choice.index in choices:
                choices[choice.index].extend(choice)
            else:
                self.outputs.append(choice)
        vars(self).update(vars(new), outputs=self.outputs)
        return self

    def copy(self) -> RequestOutput:
        """Returns a copy that `extend` does not change."""
        copied = [
            replace(each, token_ids=each.token_ids.copy(), logprobs=each.logprobs and each.logprobs.copy())
            for each in self.outputs
        ]
        return replace(self, outputs=copied)


def unpack_sampling_mask(mask: UInt8[np.ndarray, "tokens bytes"], vocab_size: int) -> Bool[np.ndarray, "tokens vocab"]:
    """Returns which tokens of the vocabulary `CompletionOutput.sampling_mask` contains, for each output token.

    Args:
        mask: uint8, `ceil(vocab_size / 8)` bytes for each output token.
        vocab_size: the model's.

    Raises:
        ValueError: the mask is not of this vocabulary size.
    """
    if mask.shape[-1] != -(-vocab_size // 8):
        raise ValueError(f"a mask of {mask.shape[-1]} bytes: a vocabulary of {vocab_size} has {-(-vocab_size // 8)}")
    return np.unpackbits(mask, axis=-1, count=vocab_size, bitorder="little").astype(bool)


def token_logprobs(token: int, logprob: float, top_ids: np.ndarray, top: np.ndarray) -> TokenLogprobs:
    """Returns the log-probabilities of the chosen token and of the alternatives (likeliest first) in one table."""
    ranks = {int(t): rank for rank, t in enumerate(top_ids, start=1)}
    table = {token: Logprob(logprob, ranks.get(token))}
    for rank, (other, value) in enumerate(zip(top_ids.tolist(), top.tolist(), strict=True), start=1):
        table.setdefault(other, Logprob(value, rank))
    return table


def with_texts(table: TokenLogprobs, text_of: Callable[[int], str]) -> TokenLogprobs:
    """Returns a table with the texts of its tokens."""
    return {token: entry._replace(decoded_token=text_of(token)) for token, entry in table.items()}
