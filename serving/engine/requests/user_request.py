"""A user's request in the engine: its choices, of which the scheduler has a request each, and their common output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import UInt8

from checkpoints.text.stream import StreamDecoder
from serving.core import Request
from serving.engine.requests.adapters import LoadedAdapter
from serving.engine.requests.output import CompletionOutput, RequestOutput, TokenLogprobs
from serving.engine.requests.request import EngineRequest
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.requests.stop_text import StopText
from serving.engine.structured.mask_workers import FollowedChoice

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
        index: int,
        params: SamplingParams,
        text: StreamDecoder | None,
        *,
        parent: UserRequest | None = None,
        seed: int = 0,
        followed: FollowedChoice | None = None,
    ) -> None:
        self.seed, self.followed = seed, followed
        self._parent = parent
        self.proposed: Sequence[int] = ()
        """With a grammar: the drafts for the next step, from the last settled step."""
        self.output = CompletionOutput(index)
        """The output since the last `take`; without `take`, all of it."""
        self.num_tokens = 0
        if params.logprobs is not None:
            self.output.logprobs, self.output.cumulative_logprob = [], 0.0
        if params.return_sampling_mask:
            self.output.sampling_masks = []
        self.changed = True
        """Whether `take` has something to return; True before the first."""
        self._params = params
        self._stream = text
        self._stops = StopText(
            params.stop_automaton, include=params.include_stop_str_in_output, after=params.stop_after
        )
        self._undecoded: list[int] = []
        """Tokens that are not converted to text yet."""

    @property
    def parent(self) -> UserRequest:
        """The user's request."""
        assert self._parent is not None
        return self._parent

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
    """Adds a token of a version to the runs."""
    before = runs.pop()[1] if runs and runs[-1][0] == version else 0
    runs.append((version, before + 1))
