"""Requests to the engine: what a caller gives, checks of prompts and parameters, and the choices while they run."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import UInt8

from checkpoints.text.stream import StreamDecoder
from checkpoints.tokenizer import Tokenizer
from serving.core.cache.retention import Mark
from serving.core.errors import RequestError
from serving.core.requests.request import RemoteState, Request
from serving.engine.requests.adapters import LoadedAdapter, LoRARequest, ReadAdapter
from serving.engine.requests.output import CompletionOutput, RequestOutput, TokenLogprobs
from serving.engine.requests.sampling_params import SamplingParams, from_table
from serving.engine.requests.stop_text import StopText
from serving.engine.structured.mask_workers import FollowedChoice

Prompt = str | Sequence[int] | Mapping[str, Any]
"""A text, a list of token ids, `{"prompt": text}` or `{"prompt_token_ids": [...]}`."""
_PROMPT_FIELDS = frozenset({"prompt", "prompt_token_ids", "cache_salt", "cache_marks"})
"""Fields of a prompt; `LLM.generate` reads the last two."""


@dataclass(frozen=True)
class EngineRequest:
    """A request, from its caller to the engine that runs it."""

    request_id: str
    """Any text that no unfinished request uses."""
    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    """Requests with smaller values are served first."""
    cache_salt: str | None = None
    """Requests share cached prefixes only with requests of the same salt."""
    cache_marks: tuple[Mark, ...] = ()
    """Positions of the prompt at which a state is worth keeping; of more than 8, the deepest."""
    message_digests: tuple[int, ...] = ()
    """Those of the conversation (`conversations`), to say which message keeps it from reusing an earlier one."""
    client: str | None = None
    """The client that sent the request; waiting clients are served in turn."""
    batch_id: str | None = None
    """Request id of the first of several prompts of one call; the queue treats them as one request."""
    live: bool = False
    """Return new output after each step, as deltas. Otherwise the finished output contains all of it."""
    lora_request: LoRARequest | None = None
    """The adapter; None uses the model as it is."""
    adapter_content: ReadAdapter | None = None
    """The content of the adapter, if the caller has read its files."""
    remote: RemoteState | None = None
    """The state of the prompt on another worker. Ignored if prompt log-probabilities are requested, or if the state was
    computed with another salt, other weights or another adapter."""
    export: Any = None
    """Receives the state at the prompt's end, for `split.prefill_side`."""
    return_experts: bool = True
    """Read the routed experts of finished choices, if the engine records them."""

    def __post_init__(self) -> None:
        for name, kind in (("params", SamplingParams), ("cache_salt", str | None)):
            if not isinstance(value := getattr(self, name), kind):
                raise RequestError(f"{name} must be {getattr(kind, '__name__', 'a text')}, got {reprlib.repr(value)}")


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocab_size: int) -> tuple[str | None, list[int]]:
    """Returns a prompt's text, if it has one, and its token ids. May be called from any thread.

    Args:
        prompt: the user's prompt.
        tokenizer: None = only token ids are allowed.
        vocab_size: the model's vocabulary size; token ids must be smaller.

    Raises:
        RequestError: the prompt is not valid.
    """
    given: Any = prompt
    if isinstance(prompt, (list, tuple, np.ndarray)):
        return None, _token_ids(prompt.tolist() if isinstance(prompt, np.ndarray) else prompt, vocab_size)
    if isinstance(prompt, Mapping):
        for name, value in prompt.items():
            if name not in _PROMPT_FIELDS and value is not None:
                raise RequestError(f"a prompt's field {name!r} is not supported: use 'prompt' or 'prompt_token_ids'")
        if "prompt_token_ids" in prompt:
            return prompt.get("prompt"), _token_ids(prompt["prompt_token_ids"], vocab_size)
        if "prompt" not in prompt:
            raise RequestError("a prompt is a text, {'prompt': text} or {'prompt_token_ids': [...]}")
        given = prompt["prompt"]
    if not isinstance(given, str):
        raise RequestError(f"a prompt must be a text, got {type(given).__name__}")
    if tokenizer is None:
        raise RequestError("this model has no tokenizer: give 'prompt_token_ids' instead of a text")
    ids = tokenizer.encode(given)
    if not ids:
        raise RequestError("the prompt is empty")
    return given, ids


def read_marks(given: Any) -> tuple[Mark, ...]:
    """Returns the marks of a prompt's field `cache_marks`: positions, or tables such as `{"position": 90, "ttl": 300}`.

    Raises:
        RequestError: it is not a list of these, or a value is not allowed.
    """
    listed = given if isinstance(given, (list, tuple)) else [] if given is None else [given]
    return tuple(Mark(each) if isinstance(each, int) else from_table(Mark, each, "cache_marks") for each in listed)


def check_params(params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int) -> None:
    """Raises `RequestError` for parameters that this model cannot serve."""
    if params.stop and tokenizer is None:
        raise RequestError("stop texts need a tokenizer, which this model does not have; use stop_token_ids")
    for name in ("logit_bias", "prompt_logprob_token_ids"):
        for token in getattr(params, name) or ():
            if token >= vocab_size:
                raise RequestError(f"{name}: token id {token} is not in the vocabulary (0 to {vocab_size - 1})")


def _token_ids(given: Any, vocab_size: int) -> list[int]:
    plain = type(given) is list and set(map(type, given)) <= {int}  # usual for long prompts; faster than checking each
    try:
        ids = given.copy() if plain else [int(token) for token in given if not isinstance(token, (bool, str))]
        wrong = not plain and (len(ids) != len(given) or any(i != t for i, t in zip(ids, given, strict=True)))
    except (TypeError, ValueError, OverflowError):
        wrong = True
    if wrong or isinstance(given, (str, bytes, Mapping)):
        raise RequestError("prompt_token_ids must be a list of integers")
    if not ids:
        raise RequestError("the prompt is empty")
    if min(ids) < 0 or max(ids) >= vocab_size:
        bad = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"prompt_token_ids: {bad} is not in the vocabulary (0 to {vocab_size - 1})")
    return ids


_PIECE = 64  # tokens decoded at once: a decoder scans the whole piece to find where its text may be cut


class UserRequest:
    """A user's request: its choices and their common output."""

    def __init__(self, given: EngineRequest, output: RequestOutput, adapter: LoadedAdapter | None = None) -> None:
        self.given, self.params, self.adapter = given, given.params, adapter
        self.output = output
        """Of a request that is not live, all of the output; of a live one, what all deltas have in common."""
        self.members: list[Request] = []
        """The scheduler's requests, one for each choice."""
        self.choices: list[Choice] = []

    def take(self) -> RequestOutput:
        """Returns the output: of a live request as a delta, which later calls do not change."""
        if not self.given.live:
            return self.output
        return replace(self.output, outputs=[choice.take() for choice in self.choices if choice.changed])


class Choice:
    """A choice of a user's request, which the scheduler's request carries as `user`. It converts tokens to text, finds
    stop texts, and has the state of its grammar (`followed`)."""

    def __init__(
        self,
        parent: UserRequest,
        index: int,
        text: StreamDecoder | None,
        *,
        seed: int = 0,
        followed: FollowedChoice | None = None,
    ) -> None:
        self.parent, self.seed, self.followed = parent, seed, followed
        self.proposed: Sequence[int] = ()
        """With a grammar: the drafts for the next step, from the last settled step."""
        self.output = CompletionOutput(index)
        """The output since the last `take`; without `take`, all of it."""
        self.num_tokens = 0
        self._params = params = parent.params
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        if params.return_sampling_mask:
            self.output.sampling_masks = []
        self.changed = True
        """Whether `take` has something to return; True before the first."""
        self._stream = text
        self._stops = StopText(
            params.stop_automaton, include=params.include_stop_str_in_output, after=params.stop_after
        )
        self._undecoded: list[int] = []
        """Tokens that are not converted to text yet."""

    @property
    def index(self) -> int:
        """The choice's number in its request."""
        return self.output.index

    @property
    def finished(self) -> bool:
        """Whether the choice has ended."""
        return self.output.finished

    def take(self) -> CompletionOutput:
        """Returns the output since the last call as a delta, which later calls do not change."""
        taken, self.changed = self.output, False
        logprobs: list[TokenLogprobs] | None = None if taken.logprobs is None else []
        versions = taken.weights_versions.copy()
        self.output = replace(taken, text="", token_ids=[], logprobs=logprobs, weights_versions=versions)
        return taken

    def append(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        masks: UInt8[np.ndarray, "tokens bytes"] | None = None,
        *,
        ended: bool = False,
        version: str = "",
    ) -> bool:
        """Appends tokens. Returns whether a stop text ended the choice; tokens after it are dropped.

        `ended`: the last token ends the output. It is one of the output's tokens, but its text is omitted, like a stop
        text. This method converts tokens to text only if there are stop texts; otherwise `refresh` does.
        `masks`: the tokens that these could have been. `version`: the version of the weights.
        """
        output = self.output
        shown = len(tokens) - (ended and not self._params.include_stop_str_in_output)
        for i, token in enumerate(tokens):
            output.token_ids.append(token)
            self.num_tokens += 1
            self.changed = True
            _count(output.weights_versions, version)
            if logprobs is not None and output.logprobs is not None:
                output.logprobs.append(logprobs[i])
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + logprobs[i][token].logprob
            if masks is not None and output.sampling_masks is not None:
                output.sampling_masks.append(masks[i].copy())  # a view would keep the masks of the whole step
            if self._stream is not None and i < shown:
                self._undecoded.append(token)
            if self._stops.texts:
                # Text before min_tokens is not searched, because it can neither contain nor begin a stop text.
                self._stops.active = self.num_tokens > self._params.min_tokens
                self.refresh()
                if self._stops.found is not None:
                    output.finish_reason, output.stop_reason = "stop", self._stops.found
                    return True
        return False

    def refresh(self) -> None:
        """Updates `text` from the tokens, except for text that may begin a stop text."""
        for begin in range(0, len(self._undecoded), _PIECE):
            if self._stream is not None and self._stops.found is None:
                self.output.text += self._stops.push(self._stream.push(self._undecoded[begin : begin + _PIECE]))
        self._undecoded.clear()

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """Ends the choice by length, a token or an abort. Adds held-back text to the output."""
        output = self.output
        if output.finished:
            return
        self.changed = True
        output.finish_reason, output.stop_reason = reason, stop_reason
        self.refresh()
        if self._stream is not None and self._stops.found is None:
            output.text += self._stops.push(self._stream.flush())
            output.text += self._stops.flush()


def _count(runs: list[tuple[str, int]], version: str) -> None:
    before = runs.pop()[1] if runs and runs[-1][0] == version else 0
    runs.append((version, before + 1))
