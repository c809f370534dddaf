"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.answer import AnswerPiece, AnswerReader
from serving.api.http.call_pieces import CallPiece, whole_calls
from serving.api.http.chat_turn import ChatTurn
from serving.api.http.context import Context
from serving.api.http.endpoint import respond
from serving.api.http.generation import ChoiceDelta, ResponseContext, stream
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.protocol.chat import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatRequest,
    ChatResponse,
    Delta,
    FunctionDelta,
    ToolCallDelta,
)
from serving.api.http.protocol.common import ErrorResponse, StreamOptions
from serving.api.http.streaming import DONE, event
from serving.engine.output import CompletionOutput, RequestOutput

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    return await respond(body, request, ChatWriter.of)


def finish_reason(reason: str | None, called: bool) -> str | None:
    """Why a choice ended, in OpenAI's words: a model that stops after a call waits for what it gives."""
    return "tool_calls" if called and reason == "stop" else reason


class ChatWriter:
    """Writes the answer to one request.

    Args:
        responses: what it is written with.
        body: the request.
        turn: what the engine is asked for.
    """

    def __init__(self, responses: ResponseContext, body: ChatRequest, turn: ChatTurn) -> None:
        self._responses, self._body, self._turn = responses, body, turn
        self.job, self.tally = turn.job, turn.tally
        self._created = int(time.time())
        self._logprobs = LogprobWriter(
            responses.codec, top=body.top_logprobs or 0, as_ids=body.return_tokens_as_token_ids
        )

    @classmethod
    async def of(cls, context: Context, body: ChatRequest) -> ChatWriter:
        """Checks everything that can be checked beforehand."""
        return cls(ResponseContext.of(context), body, await ChatTurn.of(context, body))

    def response(self, outputs: Sequence[RequestOutput]) -> ChatResponse:
        """The whole answer, from the finished output."""
        (output,) = outputs
        self.tally.latest[0] = output
        response = ChatResponse(
            id=self.job.id, object="chat.completion", created=self._created, model=self._responses.model,
            choices=[self._whole(each) for each in output.outputs], usage=self.tally.usage(),
        )  # fmt: skip
        if self._body.return_token_ids:
            response.prompt_token_ids = list(self.job.prompts[0])
        return response

    def _whole(self, output: CompletionOutput) -> ChatChoice:
        reader = self._turn.new_reader()
        said = reader.push(output.text, last=True)
        # What is nothing but reasoning or calls has no content; an answer of no words has an empty one.
        message = ChatAnswer(role="assistant", content=said.text or (None if said else ""))
        if said.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = said.reasoning
        if said.calls:
            message.tool_calls = whole_calls(said.calls)
        reason = finish_reason(output.finish_reason, reader.called)
        choice = ChatChoice(index=output.index, message=message, logprobs=None, finish_reason=reason)
        if output.logprobs is not None:
            choice.logprobs = self._logprobs.chat(output.token_ids, output.logprobs)
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        if self._body.return_token_ids:
            choice.token_ids, choice.weights_versions = output.token_ids, output.weights_versions
        return choice

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """The answer as events: the role first, then what is new, then why it ended."""
        tally, readers = self.tally, dict[int, AnswerReader]()
        options = self._body.stream_options or StreamOptions()

        def chunk(choices: list[ChatChunkChoice]) -> ChatChunk:
            made = ChatChunk(
                id=self.job.id, object="chat.completion.chunk", created=self._created,
                model=self._responses.model, choices=choices,
            )  # fmt: skip
            if options.include_usage or options.continuous_usage_stats:
                made.usage = tally.usage() if options.continuous_usage_stats else None
            return made

        async for piece in stream(context, self.job, tally):
            if piece.choice not in readers:
                begin = chunk(
                    [ChatChunkChoice(index=piece.choice, delta=Delta(role="assistant", content=""), finish_reason=None)]
                )
                if self._body.return_token_ids and not readers:
                    begin.prompt_token_ids = list(self.job.prompts[0])
                readers[piece.choice] = self._turn.new_reader()
                yield event(begin)
            shown = self._choice(piece, readers[piece.choice])
            if shown.delta.model_fields_set or piece.finish_reason or piece.logprobs or self._body.return_token_ids:
                yield event(chunk([shown]))
        if options.include_usage:
            last = chunk([])
            last.usage = tally.usage()
            yield event(last)
        yield DONE

    def _choice(self, piece: ChoiceDelta, reader: AnswerReader) -> ChatChunkChoice:
        said = reader.push(piece.text, last=piece.finish_reason is not None)
        reason = finish_reason(piece.finish_reason, reader.called)
        choice = ChatChunkChoice(index=piece.choice, delta=self._delta(said), finish_reason=reason)
        if piece.logprobs:
            choice.logprobs = self._logprobs.chat(piece.token_ids, piece.logprobs)
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
            if piece.finish_reason is not None:
                choice.weights_versions = piece.output.outputs[piece.choice].weights_versions
        return choice

    def _delta(self, said: AnswerPiece) -> Delta:
        """With nothing new to say it is empty, as in OpenAI's last event of a choice."""
        given: dict[str, Any] = {}
        if said.reasoning and self._body.include_reasoning:
            given["reasoning_content"] = given["reasoning"] = said.reasoning
        if said.text:
            given["content"] = said.text
        if said.calls:
            given["tool_calls"] = [_call_delta(call) for call in said.calls]
        return Delta(**given)


def _call_delta(piece: CallPiece) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    return ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)
