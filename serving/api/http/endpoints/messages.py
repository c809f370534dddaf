"""`/v1/messages`: Anthropic's API, on the same turns as `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.blocks import Block, Blocks, Change
from serving.api.http.chat_turn import ChatTurn, messages_of, template_options
from serving.api.http.connection.streaming import named_event
from serving.api.http.context import Context, context_of
from serving.api.http.endpoints.endpoint import answer, respond
from serving.api.http.endpoints.messages_input import chat_request
from serving.api.http.errors import ApiError
from serving.api.http.generation import stream
from serving.api.http.json_values import parse_written, well_formed
from serving.api.http.protocol.messages import (
    ContentBlock,
    Conversation,
    MessageObject,
    MessagesRequest,
    MessagesUsage,
    StopReason,
    TextBlock,
    ThinkingBlock,
    TokenCount,
    ToolUseBlock,
)
from serving.engine.requests.output import RequestOutput

router = APIRouter(tags=["Anthropic"])


@router.post("/v1/messages", response_model=MessageObject)
async def create_message(body: MessagesRequest, request: Request) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    return await respond(body, request, MessageWriter.of, failure)


@router.post("/v1/messages/count_tokens", response_model=TokenCount)
async def count_tokens(body: Conversation, request: Request) -> Response:
    """Number of tokens of a conversation, including its tools."""
    context = context_of(request)
    context.check(body.model)
    chat = chat_request(body)
    options = template_options(chat, context.settings.default_chat_template_kwargs)
    return answer(
        TokenCount(input_tokens=len(await context.codec.encode_chat(messages_of(chat), fits=False, **options)))
    )


def failure(error: ApiError) -> bytes:
    """Returns the last event of a failed stream, in Anthropic's format."""
    return named_event("error", {"error": error.fields()})


class MessageWriter:
    """Writes the response to one request.

    Args:
        turn: the request's job and readers.
        model: name of the model.
    """

    def __init__(self, turn: ChatTurn, model: str) -> None:
        self._turn, self._model = turn, model
        self.job, self.tally = turn.job, turn.tally
        self._blocks = Blocks()

    @classmethod
    async def of(cls, context: Context, body: MessagesRequest) -> MessageWriter:
        """Checks the request before generation.

        Raises:
            ApiError, RequestError: the request is invalid.
        """
        return cls(await ChatTurn.of(context, chat_request(body), prefix="msg_"), context.name_of(body.model))

    def response(self, outputs: Sequence[RequestOutput]) -> MessageObject:
        """Returns the whole response, from the finished output."""
        (output,) = outputs
        self.tally.latest[0] = output
        choice, reader = output.outputs[0], self._turn.new_reader()
        list(self._blocks.push(reader.push(choice.text, last=True)))
        reason, stop = _stop_reason(choice.finish_reason, choice.stop_reason, reader.called)
        return self._object([_content(block) for block in self._blocks.all], reason, stop)

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """Yields the response as events."""
        begun, reader = False, self._turn.new_reader()
        async for piece in stream(context, self.job, self.tally):
            if not begun:
                begun = True
                yield named_event("message_start", {"message": self._object([], None, None)})
            last = piece.finish_reason is not None
            changes = list(self._blocks.push(reader.push(piece.text, last=last)))
            if last:
                changes += self._blocks.close()
            for change in changes:
                for name, fields in _change_events(change):
                    yield named_event(name, {"index": change.block.index, **fields})
            if last:
                reason, stop = _stop_reason(piece.finish_reason, piece.stop_reason, reader.called)
                delta = {"stop_reason": reason, "stop_sequence": stop}
                yield named_event("message_delta", {"delta": delta, "usage": self._usage()})
        yield named_event("message_stop", {})

    def _object(self, content: list[ContentBlock], reason: StopReason | None, stop: str | None) -> MessageObject:
        return MessageObject(
            id=self.job.id, type="message", role="assistant", model=self._model, content=content,
            stop_reason=reason, stop_sequence=stop, usage=self._usage(),
        )  # fmt: skip

    def _usage(self) -> MessagesUsage:
        usage = self.tally.usage()
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        return MessagesUsage(
            input_tokens=usage.prompt_tokens - cached,
            cache_creation_input_tokens=0,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


def _content(block: Block) -> ContentBlock:
    match block.kind:
        case "reasoning":
            return ThinkingBlock(thinking=block.text)
        case "text":
            return TextBlock(text=block.text)
    return ToolUseBlock(id=block.call_id, name=block.name, input=_arguments(block.text))


def _arguments(text: str) -> dict[str, Any]:
    """Returns a call's arguments; empty if the output limit cut them off."""
    try:
        # Parsing twice converts escaped halves of surrogate pairs to characters.
        arguments = parse_written(well_formed(json.dumps(parse_written(text or "{}"), ensure_ascii=False)))
    except ValueError:
        return {}
    return arguments if isinstance(arguments, dict) else {}


def _change_events(change: Change) -> list[tuple[str, dict[str, Any]]]:
    """Returns the events of a change."""
    block = change.block
    match change.what:
        case "begin":
            empty = Block(block.kind, block.index, name=block.name, call_id=block.call_id)
            return [("content_block_start", {"content_block": _content(empty)})]
        case "more":
            name, kind = {
                "reasoning": ("thinking", "thinking_delta"),
                "text": ("text", "text_delta"),
                "call": ("partial_json", "input_json_delta"),
            }[block.kind]
            return [("content_block_delta", {"delta": {"type": kind, name: change.text}})]
    return [("content_block_stop", {})]


def _stop_reason(reason: str | None, stop: int | str | None, called: bool) -> tuple[StopReason | None, str | None]:
    """Returns Anthropic's stop reason and stop sequence of an answer."""
    if reason == "length":
        return "max_tokens", None
    if called:
        return "tool_use", None
    return ("stop_sequence", stop) if isinstance(stop, str) else ("end_turn", None)
