"""Responses that are lists of choices: those of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence

from serving.api.http.connection.streaming import DONE, event
from serving.api.http.context import ResponseContext
from serving.api.http.generation import ChoiceDelta, Job, UsageCounter
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.protocol.chat import ChatChoice, ChatRequest, ChatResponse
from serving.api.http.protocol.common import EncodedArray, StreamOptions
from serving.api.http.protocol.completions import CompletionChoice, CompletionRequest, CompletionResponse

Answer = ChatResponse | CompletionResponse
Choice = ChatChoice | CompletionChoice


class ChoicesWriter(ABC):
    """Writes the response to one request. A whole response is written like an event with the whole output.

    Args:
        context: the tokenizer and the model's name.
        request: the request.
        job: the engine's part of the request.
        tally: counts the tokens.
        top: number of likeliest tokens in log-probabilities.
    """

    def __init__(
        self,
        context: ResponseContext,
        request: ChatRequest | CompletionRequest,
        job: Job,
        tally: UsageCounter,
        top: int,
    ) -> None:
        self.job, self.tally = job, tally
        self._context, self._request = context, request
        self._created = int(time.time())
        self._logprobs = LogprobWriter(context.codec, top=top, as_ids=request.return_tokens_as_token_ids)

    @abstractmethod
    def _answer(self, choices: Sequence[Choice], *, whole: bool) -> Answer:
        """Returns a response, or an event, with these choices."""

    @abstractmethod
    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> Choice:
        """Returns a choice of a response, or of an event."""

    @abstractmethod
    def _events(self, piece: ChoiceDelta) -> Iterator[Answer]:
        """Yields the events of new output, without usage."""

    def response(self, pieces: Sequence[ChoiceDelta]) -> Answer:
        """Returns the whole response, from the whole output of each choice."""
        answer = self._answer([self._choice(piece, whole=True) for piece in pieces], whole=True)
        answer.usage = self.tally.usage()
        return answer

    async def events(self, pieces: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response as events."""
        options = self._request.stream_options or StreamOptions()
        async for piece in pieces:
            for made in self._events(piece):
                if options.include_usage or options.continuous_usage_stats:
                    made.usage = self.tally.usage() if options.continuous_usage_stats else None
                yield event(made)
        if options.include_usage:
            last = self._answer([], whole=False)
            last.usage = self.tally.usage()
            yield event(last)
        yield DONE

    def _add_details(self, choice: Choice, piece: ChoiceDelta, token_ids: list[int]) -> None:
        """Adds what the request asks for beyond the text; `token_ids` are those of the new output."""
        new = piece.new
        if new.stop_reason is not None:
            choice.stop_reason = new.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = token_ids
            if new.finished:
                choice.weights_versions = new.weights_versions
                choice.routed_experts = EncodedArray.of(new.routed_experts)
        if self._request.return_sampling_mask and new.finished and self.tally.with_output:
            choice.sampling_mask = EncodedArray.of(new.sampling_mask)
