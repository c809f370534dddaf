"""`/v1/responses`: OpenAI's newer API, on the same turns as `/v1/chat/completions`."""

from __future__ import annotations

import base64
import contextlib
import json
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from checkpoints.text.parts import part_text
from serving.api.http.apis.blocks import Block, BlockChange, BlocksWriter, NamedEvent
from serving.api.http.apis.inputs import ChatTurn, chat_content, messages_of
from serving.api.http.connection.streaming import named_event
from serving.api.http.context import ResponseContext, StoredResponse, owner_of
from serving.api.http.errors import ApiError, validated
from serving.api.http.generation import ChoiceDelta
from serving.api.http.logprobs import TextLogprobs
from serving.api.http.parsing.written_json import object_of
from serving.api.http.protocol import responses as protocol
from serving.api.http.protocol.chat import ChatLogprob, ChatRequest
from serving.api.http.protocol.common import CUSTOM_INPUT
from serving.api.http.protocol.responses import ResponsesRequest

Message = dict[str, Any]
Conversation = Callable[[str], Sequence[Message]]
"""Returns the messages of the conversation that ends with a stored response, without instructions."""

_OWN = "mamba-jax:"
"""The beginning of reasoning that this server returned as `encrypted_content`: its text, in base64."""
_PREFIXES = {"reasoning": "rs_", "text": "msg_", "call": "fc_"}
_EVENTS = {"reasoning": "reasoning_text", "text": "output_text", "call": "function_call_arguments"}
_SAME_NAME = (
    "instructions", "max_output_tokens", "previous_response_id", "reasoning", "temperature", "text", "top_p",
)  # fmt: skip
"""Fields of a request that its response repeats."""


def as_chat(body: ResponsesRequest, conversation: Conversation) -> ChatRequest:
    """Returns the same request to `/v1/chat/completions`. `conversation` returns that of a stored response.

    Raises:
        ApiError: a message has no role.
        RequestValidationError: a field is invalid.
    """
    messages: list[Message] = []
    if body.instructions is not None:
        messages.append({"role": "system", "content": body.instructions})
    if body.previous_response_id is not None:
        messages += conversation(body.previous_response_id)
    messages += messages_of_input(body.input)
    fields = body.chat_fields
    fields |= {"messages": messages, "max_completion_tokens": body.max_output_tokens}
    # The only argument of a custom tool is a text.
    hidden = {"function": {"type", "namespace"}, "custom": {"type", "namespace", "parameters", "input_schema"}}
    fields["tools"] = [
        {"type": tool.type, tool.type: tool.model_dump(exclude=hidden[tool.type], exclude_unset=True)}
        for tool in body.tools or ()
    ] or None
    choice = body.tool_choice.model_dump() if isinstance(body.tool_choice, BaseModel) else body.tool_choice
    allowed = isinstance(body.tool_choice, protocol.AllowedFunctions)
    fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": choice} if allowed else choice
    form = body.text.format
    if form.type != "text":
        fields["response_format"] = {"type": form.type, "schema": form.schema_}
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    return validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _as_item(content: Any = None, **fields: Any) -> dict[str, Any]:
    """Returns an item of the input as it is listed: a message has a list of contents."""
    if content is None:
        return fields
    if isinstance(content, str):
        content = [{"type": "output_text" if fields.get("role") == "assistant" else "input_text", "text": content}]
    return {"type": "message", "role": "user", **fields, "content": content}


def messages_of_input(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts input items to messages. Reasoning items and calls become part of the assistant's message, and items of
    tools that other servers run become text of it.

    Raises:
        ApiError: a message has no role, or an item's content is neither text nor parts.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        for name in ("content", "output"):
            if not isinstance(item.get(name), str | list | dict | None):
                raise _wrong(i, f"{name} must be a string or a list of parts")
        match str(item.get("type") or "message"):
            case "message":
                role = item.get("role")
                if not isinstance(role, str):
                    raise _wrong(i, "a message needs a role")
                if role == "assistant":
                    _add_text(messages, _text(item.get("content")))
                else:
                    messages.append({"role": role, "content": chat_content(item.get("content"))})
            case "reasoning":
                if thought := _thought(item):
                    _assistant(messages, new=True)["reasoning_content"] = thought
            case "function_call" | "custom_tool_call" as kind:
                arguments = item.get("arguments")
                if kind == "custom_tool_call":
                    arguments = json.dumps({CUSTOM_INPUT: item.get("input") or ""})
                function = {"name": item.get("name"), "arguments": arguments or "{}"}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output" | "custom_tool_call_output":
                content = chat_content(item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case "item_reference":
                raise _wrong(i, "items of type 'item_reference' are not supported: send the item itself")
            case kind if kind.startswith("input_"):
                messages.append({"role": "user", "content": part_text(item)})
            case kind:
                left_out = ("id", "type", "status", *(("result",) if kind == "image_generation_call" else ()))
                values = {
                    name: part_text(value) if name == "output" and isinstance(value, dict) else value
                    for name, value in item.items()
                    if name not in left_out
                }
                _add_text(messages, f"[{kind[:40]}] {json.dumps(values, ensure_ascii=False)}")
    return messages


def _wrong(i: int, why: str) -> ApiError:
    return ApiError(400, f"input.{i}: {why}", param="input")


def _thought(item: Mapping[str, Any]) -> str:
    """Returns the text of a reasoning item."""
    parts = item.get("content") or item.get("summary")
    encrypted = item.get("encrypted_content")
    if not parts and isinstance(encrypted, str) and encrypted.startswith(_OWN):
        with contextlib.suppress(ValueError):
            return base64.b64decode(encrypted.removeprefix(_OWN), validate=True).decode()
    return _text(parts if isinstance(parts, list) else None)


def _add_text(messages: list[dict[str, Any]], text: str) -> None:
    message = _assistant(messages)
    message["content"] = f"{message['content']}\n{text}" if message["content"] else text


def _assistant(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Returns the assistant's message at the end of the conversation; appends one if there is none."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(map(part_text, content)) if isinstance(content, list) else part_text(content)


def _custom_input(arguments: str) -> str:
    """Returns the text of a call of a tool of type `custom`."""
    value = (object_of(arguments) or {}).get(CUSTOM_INPUT)
    return value if isinstance(value, str) else arguments


def failure(error: ApiError) -> bytes:
    """Returns the last events of a failed stream: clients look at one or the other."""
    fields = error.fields()
    told = {"code": fields["code"] or fields["type"], "message": fields["message"]}
    response = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "status": "failed", "error": told, "output": []}
    event = named_event("error", {"sequence_number": 0, "error": fields, "param": fields["param"], **told})
    return event + named_event("response.failed", {"sequence_number": 1, "response": response})


class ResponseWriter(BlocksWriter):
    """Writes the response to one request, and stores it. `prompts`: the token ids of the conversation, in a list."""

    def __init__(
        self, context: ResponseContext, body: ResponsesRequest, request: ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        turn = ChatTurn(context, request, prompts[0], prefix="resp_")
        super().__init__(turn)
        self._context, self._body = context, body
        self._custom = {tool.name for tool in body.tools or () if tool.type == "custom"}
        spaces = {tool.name: (tool.model_extra or {}).get("namespace") for tool in body.tools or ()}
        self._spaces = {name: space for name, space in spaces.items() if space is not None}
        self._messages = messages_of(request)[0 if body.instructions is None else 1 :]
        self._created, self._num_events = int(time.time()), 0
        self._items: list[protocol.OutputItem] = []
        self._status: protocol.Status = "completed"
        """The status of a block that ends: `incomplete` if the output limit cuts it off."""
        top, reasoning = body.top_logprobs or 0, turn.job.reasoning
        self._logprobs = TextLogprobs(context.codec, top=top, reasoning=reasoning) if body.wants_logprobs else None
        self._entries = defaultdict[int, list[ChatLogprob]](list)
        """Log-probabilities of each block of text."""

    def _begin(self) -> list[NamedEvent]:
        begun = {"response": self._object("in_progress", [])}
        return [("response.created", begun), ("response.in_progress", begun)]

    def _event(self, name: str, fields: Mapping[str, Any]) -> bytes:
        number, self._num_events = self._num_events, self._num_events + 1
        return named_event(name, {"sequence_number": number, **fields})

    def _end(self) -> list[NamedEvent]:
        whole = self._whole()
        return [(f"response.{whole.status}", {"response": whole})]

    def _named(self, piece: ChoiceDelta) -> Iterator[NamedEvent]:
        if self._logprobs is not None and piece.new.logprobs is not None:
            self._logprobs.push(piece.new.token_ids, piece.new.logprobs)
        yield from super()._named(piece)

    def _finish(self) -> Iterator[NamedEvent]:
        if self._logprobs is not None and self._blocks and self._blocks[-1].kind == "text":
            self._entries[self._blocks[-1].index] += self._logprobs.rest()
        if self._last is not None and self._last.finish_reason == "length":
            self._status = "incomplete"
        yield from super()._finish()

    def _change(self, what: BlockChange, block: Block, text: str = "") -> list[NamedEvent]:
        if what == "begin":
            block.item_id = _PREFIXES[block.kind] + uuid.uuid4().hex
            if block.kind == "reasoning" and self.job.reasoning is None:
                self._logprobs = None  # the marks are not tokens, so the tokens of the text are unknown
        at = {"output_index": block.index}
        within = at | {"item_id": block.item_id}
        part = within if block.kind == "call" else within | {"content_index": 0}
        kind = _EVENTS[block.kind]
        content = {"part": self._content(block)} if block.kind != "call" and what != "more" else {}
        match what:
            case "begin":
                added = ("response.output_item.added", at | {"item": self._item(block, "in_progress")})
                return [added, ("response.content_part.added", part | content)] if content else [added]
            case "more" if block.name in self._custom:
                return []  # the text is known when the JSON object around it is complete
            case "more":
                more: dict[str, Any] = {}
                if block.kind == "text":
                    more["logprobs"] = [] if self._logprobs is None else self._logprobs.take(len(text))
                    self._entries[block.index] += more["logprobs"]
                return [(f"response.{kind}.delta", part | {"delta": text} | more)]
        done: list[NamedEvent]
        if block.name in self._custom:
            written = _custom_input(block.text)
            done = [("response.custom_tool_call_input.delta", part | {"delta": written})]
            done.append(("response.custom_tool_call_input.done", part | {"input": written}))
        elif block.kind == "call":
            done = [(f"response.{kind}.done", part | {"arguments": block.text, "name": block.name})]
        else:
            more = {"logprobs": self._entries[block.index]} if block.kind == "text" else {}
            done = [(f"response.{kind}.done", part | {"text": block.text} | more)]
            done.append(("response.content_part.done", part | content))
        self._items.append(self._item(block, self._status))
        return [*done, ("response.output_item.done", at | {"item": self._items[-1]})]

    def _item(self, block: Block, status: protocol.Status) -> protocol.OutputItem:
        same: dict[str, Any] = {"id": block.item_id, "status": status}
        begun = status == "in_progress"
        if block.kind != "call":
            same["content"] = [] if begun else [self._content(block)]
            if block.kind == "text":
                return protocol.OutputMessage(**same)
            sealed = None
            if "reasoning.encrypted_content" in (self._body.include or ()) and not begun:
                sealed = _OWN + base64.b64encode(block.text.encode()).decode()
            return protocol.OutputReasoning(encrypted_content=sealed, **same)
        same |= {"call_id": block.call_id, "name": block.name}
        if block.name in self._custom:
            return protocol.OutputCustomCall(input="" if begun else _custom_input(block.text), **same)
        space = {"namespace": self._spaces[block.name]} if block.name in self._spaces else {}
        return protocol.OutputCall(arguments=block.text, **same, **space)

    def _content(self, block: Block) -> protocol.OutputText | protocol.ReasoningText:
        if block.kind == "text":
            return protocol.OutputText(text=block.text, logprobs=self._entries[block.index])
        return protocol.ReasoningText(text=block.text)

    def _whole(self) -> protocol.ResponseObject:
        """Returns the whole response, and stores it unless the request declines that."""
        whole = self._object(self._status, self._items)
        if self._body.store is not False:
            messages = [*self._messages, *messages_of_input([item.model_dump() for item in self._items])]
            given = self._body.input
            listed = [_as_item(given)] if isinstance(given, str) else [_as_item(**item) for item in given]
            written = whole.model_dump_json(by_alias=True).encode()
            stored = StoredResponse(messages, written, owner_of(self._context.key), listed)
            self._context.store.put(self.job.request.request_id, stored)
        return whole

    def _object(self, status: protocol.Status, items: list[protocol.OutputItem]) -> protocol.ResponseObject:
        body = self._body
        return protocol.ResponseObject(
            id=self.job.request.request_id,
            created_at=self._created,
            status=status,
            incomplete_details=protocol.Incomplete(reason="max_output_tokens") if status == "incomplete" else None,
            metadata=body.metadata or {},
            model=self._context.model,
            output=items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            store=body.store is not False,
            tool_choice="auto" if body.tool_choice is None else body.tool_choice,
            tools=body.tools or [],
            top_logprobs=body.top_logprobs or 0,
            usage=None if status == "in_progress" else self._usage(),
            **{name: getattr(body, name) for name in _SAME_NAME},
        )

    def _usage(self) -> protocol.ResponsesUsage:
        usage = self.job.usage()
        details = usage.completion_tokens_details
        return protocol.ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=usage.prompt_tokens_details,
            output_tokens=usage.completion_tokens,
            output_tokens_details=protocol.OutputDetails(reasoning_tokens=(details and details.reasoning_tokens) or 0),
            total_tokens=usage.total_tokens,
        )
