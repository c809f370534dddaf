"""`/v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.chat_turn import ChatTurn
from serving.api.http.connection.streaming import DONE, event
from serving.api.http.context import Context
from serving.api.http.endpoints.endpoint import respond
from serving.api.http.generation import ChoiceDelta, ResponseContext, stream
from serving.api.http.logprobs import LogprobWriter
from serving.api.http.parsing.answer import AnswerPiece, AnswerReader
from serving.api.http.parsing.call_pieces import CallPiece, whole_calls
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
from serving.api.http.protocol.common import EncodedArray, ErrorResponse, StreamOptions
from serving.engine.requests.output import CompletionOutput, RequestOutput

router = APIRouter(tags=["OpenAI"])


@router.post("/v1/chat/completions", response_model=ChatResponse, responses={400: {"model": ErrorResponse}})
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    return await respond(body, request, ChatWriter.of)


def finish_reason(reason: str | None, called: bool) -> str | None:
    """Returns OpenAI's finish reason of a choice: "tool_calls" if the model stopped after a call."""
    return "tool_calls" if called and reason == "stop" else reason


class ChatWriter:
    """Writes the response to one request.

    Args:
        responses: the server's codec, model name, defaults and formats.
        body: the request.
        turn: the request's job and readers.
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
        """Checks the request before generation."""
        return cls(ResponseContext.of(context, body.model), body, await ChatTurn.of(context, body))

    def response(self, outputs: Sequence[RequestOutput]) -> ChatResponse:
        """Returns the whole response, from the finished output."""
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
        piece = reader.push(output.text, last=True)
        # Content is null if there is only reasoning or calls, and "" for an empty answer.
        message = ChatAnswer(role="assistant", content=piece.text or (None if piece else ""))
        if piece.reasoning and self._body.include_reasoning:
            message.reasoning_content = message.reasoning = piece.reasoning
        if piece.calls:
            message.tool_calls = whole_calls(piece.calls)
        reason = finish_reason(output.finish_reason, reader.called)
        choice = ChatChoice(index=output.index, message=message, logprobs=None, finish_reason=reason)
        if output.logprobs is not None:
            choice.logprobs = self._logprobs.chat(output.token_ids, output.logprobs)
        if output.stop_reason is not None:
            choice.stop_reason = output.stop_reason
        if self._body.return_token_ids:
            choice.token_ids, choice.weights_versions = output.token_ids, output.weights_versions
            choice.routed_experts = EncodedArray.of(output.routed_experts)
        if self._body.return_sampling_mask:
            choice.sampling_mask = EncodedArray.of(output.sampling_mask)
        return choice

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """Yields the response as events: first the role, then new output, then the finish reason."""
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
        parsed = reader.push(piece.text, last=piece.finish_reason is not None)
        reason = finish_reason(piece.finish_reason, reader.called)
        choice = ChatChunkChoice(index=piece.choice, delta=self._delta(parsed), finish_reason=reason)
        if piece.logprobs:
            choice.logprobs = self._logprobs.chat(piece.token_ids, piece.logprobs)
        if piece.stop_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = piece.token_ids
            if piece.finish_reason is not None:
                whole = piece.output.outputs[piece.choice]
                choice.weights_versions = whole.weights_versions
                choice.routed_experts = EncodedArray.of(whole.routed_experts)
        if self._body.return_sampling_mask and piece.finish_reason is not None:
            choice.sampling_mask = EncodedArray.of(piece.output.outputs[piece.choice].sampling_mask)
        return choice

    def _delta(self, piece: AnswerPiece) -> Delta:
        """Returns the delta of a piece; empty without new output, as in OpenAI's last event of a choice."""
        fields: dict[str, Any] = {}
        if piece.reasoning and self._body.include_reasoning:
            fields["reasoning_content"] = fields["reasoning"] = piece.reasoning
        if piece.text:
            fields["content"] = piece.text
        if piece.calls:
            fields["tool_calls"] = [_call_delta(call) for call in piece.calls]
        return Delta(**fields)


def _call_delta(piece: CallPiece) -> ToolCallDelta:
    if piece.name is None:
        return ToolCallDelta(index=piece.index, function=FunctionDelta(arguments=piece.arguments))
    function = FunctionDelta(name=piece.name, arguments=piece.arguments)
    return ToolCallDelta(index=piece.index, id=piece.id, type="function", function=function)
