"""Responses that are lists of choices: those of `/v1/completions` and `/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Sequence
from itertools import accumulate
from typing import Any

from serving.api.http.apis.inputs import ChatTurn, sampling_params, unenforced
from serving.api.http.connection.streaming import DONE, encoded, json_of
from serving.api.http.context import ResponseContext
from serving.api.http.generation import ChoiceDelta, Job
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.parsing.answer import AnswerReader
from serving.api.http.parsing.answer_pieces import AnswerPiece, whole_calls
from serving.api.http.protocol.chat import ChatAnswer, ChatChoice, ChatRequest, ChatResponse
from serving.api.http.protocol.common import EncodedArray, StreamOptions
from serving.api.http.protocol.completions import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionRequest,
    CompletionResponse,
)
from serving.engine.requests.output import TokenLogprobs
from serving.engine.requests.request import EngineRequest

ChoicesResponse = ChatResponse | CompletionResponse
ResponseChoice = ChatChoice | CompletionChoice


class ChoicesWriter(ABC):
    """Writes the response to one request. A whole response is written like an event with the whole output."""

    def __init__(
        self, context: ResponseContext, request: ChatRequest | CompletionRequest, job: Job, top: int | None
    ) -> None:
        self.job, self._context, self._request = job, context, request
        self._created = int(time.time())
        self._logprobs = LogprobWriter(context.codec, top=top or 0, as_ids=request.return_tokens_as_token_ids)

    @abstractmethod
    def _answer(self, choices: Sequence[ResponseChoice], *, whole: bool) -> ChoicesResponse:
        """Returns a response, or an event, with these choices."""

    @abstractmethod
    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> ResponseChoice:
        """Returns a choice of a response, or of an event."""

    @abstractmethod
    def _events(self, piece: ChoiceDelta) -> Iterator[ChoicesResponse]:
        """Yields the events of new output, without usage."""

    def response(self, pieces: Sequence[ChoiceDelta]) -> ChoicesResponse:
        """Returns the whole response, from the whole output of each choice."""
        answer = self._answer([self._choice(piece, whole=True) for piece in pieces], whole=True)
        answer.usage = self.job.usage()
        return answer

    async def events(self, pieces: AsyncGenerator[ChoiceDelta, None]) -> AsyncGenerator[bytes, None]:
        """Yields the response as events."""
        options = self._request.stream_options or StreamOptions()
        run = self._context.codec.run
        async for piece in pieces:
            size = piece.num_tokens
            for made in await run(size, lambda piece=piece: list(self._events(piece))):  # type: ignore[misc]
                if options.include_usage or options.continuous_usage_stats:
                    made.usage = self.job.usage() if options.continuous_usage_stats else None
                async for part in encoded(run, made, b"data: ", b"\n\n"):
                    yield part
        if options.include_usage:
            last = self._answer([], whole=False)
            last.usage = self.job.usage()
            yield b"data: " + json_of(last) + b"\n\n"
        yield DONE

    def _add_details(self, choice: ResponseChoice, piece: ChoiceDelta, token_ids: list[int]) -> None:
        """Adds what the request asks for beyond the text; `token_ids` are those of the new output."""
        new = piece.new
        if new.stop_reason is not None:
            choice.stop_reason = new.stop_reason
        if self._request.return_token_ids:
            choice.token_ids = token_ids
            if new.finished:
                choice.weights_versions = new.weights_versions
                choice.routed_experts = EncodedArray.of(new.routed_experts)
        if self._request.return_sampling_mask and new.finished and self.job.with_output:
            choice.sampling_mask = EncodedArray.of(new.sampling_mask)


class ChatWriter(ChoicesWriter):
    """Writes the response to one request. `prompts`: the token ids of the conversation, in a list."""

    def __init__(
        self, context: ResponseContext, body: ChatRequest, request: ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        self._turn = ChatTurn(context, request, prompts[0])
        super().__init__(context, request, self._turn.job, request.top_logprobs)
        self._body = body
        self._readers: dict[int, AnswerReader] = {}

    def _answer(self, choices: Sequence[ResponseChoice], *, whole: bool) -> ChatResponse:
        answer = ChatResponse(
            id=self.job.request.request_id, object="chat.completion" if whole else "chat.completion.chunk",
            created=self._created, model=self._context.model,
            choices=[each for each in choices if isinstance(each, ChatChoice)],
        )  # fmt: skip
        if self._body.return_token_ids and (whole or not self._readers):
            answer.prompt_token_ids = list(self.job.prompts[0])
        return answer

    def _events(self, piece: ChoiceDelta) -> Iterator[ChatResponse]:
        """Yields first the role, then new output, then the finish reason."""
        index, new = piece.new.index, piece.new
        if index not in self._readers:
            role = ChatAnswer(role="assistant", content="")
            yield self._answer([ChatChoice(index=index, delta=role, finish_reason=None)], whole=False)
        choice = self._choice(piece, whole=False)
        written = choice.delta is not None and choice.delta.model_fields_set
        if written or new.finished or new.logprobs or self._body.return_token_ids:
            yield self._answer([choice], whole=False)

    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> ChatChoice:
        new = piece.new
        if new.index not in self._readers:
            self._readers[new.index] = self._turn.new_reader()
        reader = self._readers[new.index]
        message = self._message(reader.push(new.text, last=new.finished, cut=new.finish_reason != "stop"), whole=whole)
        reason = "tool_calls" if reader.called and new.finish_reason == "stop" else new.finish_reason
        place: dict[str, Any] = {"message": message, "logprobs": None} if whole else {"delta": message}
        choice = ChatChoice(index=new.index, finish_reason=reason, **place)
        if new.logprobs:
            choice.logprobs = self._logprobs.chat(new.token_ids, new.logprobs)
        self._add_details(choice, piece, new.token_ids)
        return choice

    def _message(self, parsed: AnswerPiece, *, whole: bool) -> ChatAnswer:
        """Returns the message, or new output of it; empty without new output, as in OpenAI's last event of a choice."""
        fields: dict[str, Any] = {}
        if text := parsed.of("text"):
            fields["content"] = text
        if whole:
            # Content is null if there is only reasoning or calls, and "" for an empty answer.
            fields = {"role": "assistant", "content": None if parsed.parts else ""} | fields
        if (thought := parsed.of("reasoning")) and self._body.include_reasoning:
            fields["reasoning_content"] = fields["reasoning"] = thought
        if calls := parsed.calls:
            fields["tool_calls"] = whole_calls(calls) if whole else calls
        return ChatAnswer(**fields)


class CompletionWriter(ChoicesWriter):
    """Writes the response to one request. `prompts`: the token ids of its prompts."""

    def __init__(
        self, context: ResponseContext, body: CompletionRequest, _: CompletionRequest, prompts: Sequence[list[int]]
    ) -> None:
        params = sampling_params(body, context.settings.default_sampling)
        asked = EngineRequest(f"cmpl-{uuid.uuid4().hex}", "", params, body.priority, body.cache_salt)
        # With max_tokens = 0 the engine still generates one token, which is not reported.
        job = Job(asked, prompts, ignored=unenforced(body), with_output=body.max_tokens != 0)
        super().__init__(context, body, job, body.logprobs)
        self._body = body
        self._echoes = [self._echo(*each) for each in zip(body.prompts, prompts, strict=True)] if body.echo else []
        """The texts of the prompts, for `echo`."""
        self._offsets: dict[int, int] = {}
        """By choice that has begun: characters of its text that belong to the tokens reported so far."""

    def _echo(self, prompt: str | list[int], token_ids: list[int]) -> str:
        if isinstance(prompt, str):
            return prompt
        tokenizer = self._context.codec.tokenizer
        return "" if tokenizer is None else tokenizer.decode(token_ids, skip_special_tokens=False)

    def _answer(self, choices: Sequence[ResponseChoice], *, whole: bool) -> CompletionResponse:
        return CompletionResponse(
            id=self.job.request.request_id, object="text_completion", created=self._created, model=self._context.model,
            choices=[each for each in choices if isinstance(each, CompletionChoice)],
        )  # fmt: skip

    def _events(self, piece: ChoiceDelta) -> Iterator[CompletionResponse]:
        first = self._index(piece) not in self._offsets
        shown = self._choice(piece, whole=False)
        # The engine holds back text that may start a stop string or that ends within a character.
        if first or shown.text or shown.logprobs or piece.new.finished or self._body.return_token_ids:
            yield self._answer([shown], whole=False)

    def _index(self, piece: ChoiceDelta) -> int:
        return piece.prompt * self._body.n + piece.new.index

    def _choice(self, piece: ChoiceDelta, *, whole: bool) -> CompletionChoice:
        """Returns a choice, or its new output. The echo precedes its first output."""
        index = self._index(piece)
        first, new = index not in self._offsets, piece.new
        self._offsets.setdefault(index, 0)
        tokens, text = new.token_ids, new.text
        tables: Sequence[TokenLogprobs] = new.logprobs or ()
        scores = piece.output.prompt_logprobs or ()
        if self._body.max_tokens == 0:
            tokens, text, tables = [], "", []
        echoed, prompt = "", []
        if self._body.echo and first:
            echoed, prompt = self._echoes[piece.prompt], [*self.job.prompts[piece.prompt]]
        choice = CompletionChoice(index=index, text=echoed + text, logprobs=None, finish_reason=new.finish_reason)
        if self._body.logprobs is not None and (prompt or tokens):
            shown = scores if prompt else ()
            choice.logprobs = self._written(index, prompt, shown, tokens, tables, echoed)
        if self._body.scores_prompt and first and new.index == 0:
            choice.prompt_logprobs = self._logprobs.prompt(scores)
        self._add_details(choice, piece, tokens)
        if self._body.return_token_ids and first:
            choice.prompt_token_ids = list(self.job.prompts[piece.prompt])
        return choice

    def _written(
        self,
        index: int,
        prompt_ids: list[int],
        scores: Sequence[TokenLogprobs | None],
        token_ids: list[int],
        tables: Sequence[TokenLogprobs],
        echoed: str,
    ) -> CompletionLogprobs:
        """Returns the log-probabilities of the echoed prompt, whose text is `echoed`, and of new tokens."""
        codec, offset = self._context.codec, self._offsets[index]
        tokens, prompt = [*prompt_ids, *token_ids], len(prompt_ids)
        sizes = [len(codec.token(token)) for token in tokens]
        hidden = set(codec.hidden(tokens[:prompt], echoed))
        if (first := next((i for i in range(prompt) if i not in hidden), None)) is not None:
            sizes[first] = len(codec.first_token(tokens[first]))
        for i in hidden:
            sizes[i] = 0
        if self.job.request.params.skip_special_tokens:
            written = list(zip(tokens, sizes, strict=True))[prompt:]
            sizes[prompt:] = [0 if codec.is_special(token) else size for token, size in written]
        offsets = list(accumulate(sizes, initial=offset))
        self._offsets[index] = offsets.pop()
        return self._logprobs.completion(tokens, scores, tables, offsets)
