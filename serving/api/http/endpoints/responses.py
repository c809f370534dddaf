"""`/v1/responses`: OpenAI's newer API, on the same turns as `/v1/chat/completions`."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from serving.api.http.blocks import Block, Blocks, Change
from serving.api.http.chat_turn import ChatTurn
from serving.api.http.connection.keys import sent_key
from serving.api.http.connection.streaming import named_event
from serving.api.http.context import Context
from serving.api.http.endpoints.endpoint import answer, respond
from serving.api.http.endpoints.response_store import ResponseStore, Stored, owner_of
from serving.api.http.endpoints.responses_input import chat_request, items_as_input, messages_of_input
from serving.api.http.errors import ApiError
from serving.api.http.generation import stream
from serving.api.http.logprobs import TextLogprobs
from serving.api.http.parsing.answer import AnswerPiece
from serving.api.http.protocol.chat import ChatLogprob
from serving.api.http.protocol.common import ErrorResponse
from serving.api.http.protocol.responses import (
    DeletedResponse,
    Incomplete,
    InputDetails,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponseObject,
    ResponsesRequest,
    ResponsesUsage,
    Status,
)
from serving.api.http.text import TextCodec
from serving.engine.requests.output import RequestOutput, TokenLogprobs

_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}


def responses_router(store: ResponseStore) -> APIRouter:
    """Returns the paths, with responses stored in `store`."""
    router = APIRouter(tags=["OpenAI"])

    @router.post("/v1/responses", response_model=ResponseObject, responses={400: {"model": ErrorResponse}})
    async def create_response(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation, or continue a stored one; with `stream` as server-sent events."""
        key = sent_key(request.headers)

        async def writer_of(context: Context, body: ResponsesRequest) -> ResponseWriter:
            return await ResponseWriter.of(context, body, store, key)

        return await respond(body, request, writer_of)

    @router.get("/v1/responses/{response_id}", response_model=ResponseObject)
    async def get_response(response_id: str, request: Request) -> Response:
        """A stored response."""
        stored = store.get(response_id, sent_key(request.headers))
        if stored is None:
            raise _unknown(response_id, "response_id")
        return Response(stored.response, media_type="application/json")

    @router.delete("/v1/responses/{response_id}", response_model=DeletedResponse)
    async def delete_response(response_id: str, request: Request) -> Response:
        """Delete a stored response."""
        if not store.delete(response_id, sent_key(request.headers)):
            raise _unknown(response_id, "response_id")
        return answer(DeletedResponse(id=response_id, object="response", deleted=True))

    return router


def _unknown(response_id: str, param: str) -> ApiError:
    return ApiError(
        404, f"there is no stored response {response_id[:64]!r}: responses are stored in memory, within limits, until "
        "the server ends", param=param, code="response_not_found",
    )  # fmt: skip


class ResponseWriter:
    """Writes the response to one request.

    Args:
        body: the request.
        turn: the request's job and readers.
        model: name of the model.
        messages: the conversation so far, without instructions.
        store: stores the response.
        key: the client's key.
        codec: returns the texts of tokens.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        turn: ChatTurn,
        model: str,
        messages: Sequence[dict[str, Any]],
        store: ResponseStore,
        key: str | None,
        codec: TextCodec,
    ) -> None:
        self._body, self._turn, self._model, self._messages = body, turn, model, messages
        self._store, self._key = store, key
        self.job, self.tally = turn.job, turn.tally
        self._created = int(time.time())
        self._blocks = Blocks()
        self._ids: list[str] = []
        """Ids of the blocks."""
        top, reasoning = body.top_logprobs or 0, turn.tally.reasoning
        self._logprobs = TextLogprobs(codec, top=top, reasoning=reasoning) if body.wants_logprobs else None
        self._entries: dict[int, list[ChatLogprob]] = {}
        """Log-probabilities of each block of text."""

    @classmethod
    async def of(
        cls, context: Context, body: ResponsesRequest, store: ResponseStore, key: str | None
    ) -> ResponseWriter:
        """Checks the request before generation.

        Raises:
            ApiError, RequestError: the request is invalid.
        """
        messages: list[dict[str, Any]] = []
        if body.previous_response_id is not None:
            before = store.get(body.previous_response_id, key)
            if before is None:
                raise _unknown(body.previous_response_id, "previous_response_id")
            messages += before.messages
        messages += messages_of_input(body.input)
        turn = await ChatTurn.of(context, chat_request(body, messages), prefix="resp_")
        return cls(body, turn, context.name_of(body.model), messages, store, key, context.codec)

    def response(self, outputs: Sequence[RequestOutput]) -> ResponseObject:
        """Returns the whole response, from the finished output."""
        (output,) = outputs
        self.tally.latest[0] = output
        self._push_logprobs(output.outputs[0].token_ids, output.outputs[0].logprobs)
        for change in self._changes(self._turn.new_reader().push(output.outputs[0].text, last=True), last=True):
            self._note(change)
        return self._finished(output.outputs[0].finish_reason)

    async def events(self, context: Context) -> AsyncGenerator[bytes, None]:
        """Yields the response as numbered events."""
        number, reader, reason = 0, self._turn.new_reader(), None
        begun = self._object("in_progress", [])
        waiting = [("response.created", {"response": begun}), ("response.in_progress", {"response": begun})]
        async for piece in stream(context, self.job, self.tally):
            reason = piece.finish_reason
            self._push_logprobs(piece.token_ids, piece.logprobs)
            parsed = reader.push(piece.text, last=reason is not None)
            for change in self._changes(parsed, last=reason is not None):
                waiting += self._change_events(change)
            for name, fields in waiting:
                yield named_event(name, {"sequence_number": number, **fields})
                number += 1
            waiting = []
        whole = self._finished(reason)
        yield named_event(f"response.{whole.status}", {"sequence_number": number, "response": whole})

    def _push_logprobs(self, tokens: Sequence[int], tables: Sequence[TokenLogprobs] | None) -> None:
        if self._logprobs is not None:
            self._logprobs.push(tokens, tables)

    def _changes(self, piece: AnswerPiece, *, last: bool) -> Iterator[Change]:
        yield from self._blocks.push(piece)
        if last:
            if self._logprobs is not None and self._blocks.all and self._blocks.all[-1].kind == "text":
                self._entries[self._blocks.all[-1].index] += self._logprobs.rest()
            yield from self._blocks.close()

    def _note(self, change: Change) -> list[ChatLogprob]:
        """Records a change. Returns the log-probabilities of the new text."""
        if change.what == "begin":
            self._ids.append(_PREFIXES[change.block.kind] + uuid.uuid4().hex)
            self._entries[change.block.index] = []
            if change.block.kind == "reasoning" and self.tally.reasoning is None:
                self._logprobs = None  # the marks are not tokens, so the tokens of the text are unknown
        if change.what != "more" or change.block.kind != "text" or self._logprobs is None:
            return []
        new = self._logprobs.take(len(change.text))
        self._entries[change.block.index] += new
        return new

    def _change_events(self, change: Change) -> list[tuple[str, dict[str, Any]]]:
        """Returns the events of a change."""
        new = self._note(change)
        block = change.block
        at = {"output_index": block.index}
        within = at | {"item_id": self._ids[block.index]}
        part = within if block.kind == "call" else within | {"content_index": 0}
        kind = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}[block.kind]
        content = {"part": self._output_text(block) if block.kind == "text" else ReasoningText(text=block.text)}
        match change.what:
            case "begin":
                opened: list[tuple[str, dict[str, Any]]] = [
                    ("response.output_item.added", at | {"item": self._item(block, "in_progress", empty=True)})
                ]
                if block.kind != "call":
                    opened.append(("response.content_part.added", part | content))
                return opened
            case "more":
                more: dict[str, Any] = {"logprobs": new} if block.kind == "text" else {}
                return [(f"response.{kind}.delta", part | {"delta": change.text} | more)]
        if block.kind == "call":
            done: list[tuple[str, dict[str, Any]]] = [
                (f"response.{kind}.done", part | {"arguments": block.text, "name": block.name})
            ]
        else:
            more = {"logprobs": self._entries[block.index]} if block.kind == "text" else {}
            done = [(f"response.{kind}.done", part | {"text": block.text} | more)]
            done.append(("response.content_part.done", part | content))
        return [*done, ("response.output_item.done", at | {"item": self._item(block, "completed")})]

    def _item(self, block: Block, status: Status, *, empty: bool = False) -> OutputItem:
        name = self._ids[block.index]
        match block.kind:
            case "reasoning":
                thought = [] if empty else [ReasoningText(text=block.text)]
                return OutputReasoning(id=name, content=thought, status=status)
            case "text":
                parsed = [] if empty else [self._output_text(block)]
                return OutputMessage(id=name, status=status, content=parsed)
        return OutputCall(id=name, call_id=block.call_id, name=block.name, arguments=block.text, status=status)

    def _output_text(self, block: Block) -> OutputText:
        return OutputText(text=block.text, logprobs=self._entries[block.index])

    def _finished(self, reason: str | None) -> ResponseObject:
        """Returns the whole response; stored unless the request declines it."""
        status: Status = "incomplete" if reason == "length" else "completed"
        items = [self._item(block, "completed") for block in self._blocks.all]
        if status == "incomplete" and items:
            items[-1].status = "incomplete"
        whole = self._object(status, items)
        if self._body.store is not False:
            messages = [*self._messages, *messages_of_input(items_as_input(items))]
            stored = Stored(messages, whole.model_dump_json(by_alias=True).encode(), owner_of(self._key))
            self._store.put(self.job.id, stored)
        return whole

    def _object(self, status: Status, items: list[OutputItem]) -> ResponseObject:
        body = self._body
        usage = self.tally.usage() if status != "in_progress" else None
        details = usage.completion_tokens_details if usage is not None else None
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else 0
        return ResponseObject(
            id=self.job.id,
            object="response",
            created_at=self._created,
            status=status,
            error=None,
            incomplete_details=Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model,
            output=items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=body.reasoning,
            store=body.store is not False,
            temperature=body.temperature,
            text=body.text,
            tool_choice=body.tool_choice if body.tool_choice is not None else "auto",
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            top_p=body.top_p,
            truncation="disabled",
            usage=None
            if usage is None
            else ResponsesUsage(
                input_tokens=usage.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=cached),
                output_tokens=usage.completion_tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=(details and details.reasoning_tokens) or 0),
                total_tokens=usage.total_tokens,
            ),
        )
