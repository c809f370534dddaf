"""`/v1/messages`: Anthropic's API, on the same turns as `/v1/chat/completions`."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from serving.api.http.apis.blocks import Block, BlockChange, BlocksWriter, NamedEvent
from serving.api.http.apis.cache_marks import TOOLS, client_marks, marks_of, with_marks
from serving.api.http.apis.inputs import ChatTurn, chat_content, messages_of
from serving.api.http.context import ResponseContext
from serving.api.http.errors import validated
from serving.api.http.parsing.written_json import object_of
from serving.api.http.protocol import messages as protocol
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.messages import MessagesRequest


def as_chat(body: protocol.Conversation) -> ChatRequest:
    """Returns the same request to `/v1/chat/completions`.

    Raises:
        RequestValidationError: a field is invalid.
    """
    fields = body.chat_fields
    system = body.system and chat_content(body.system)
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for message in body.messages:
        messages += _messages(message)
    final = messages[-1] if messages else {}
    continues = final.get("role") == "assistant" and _has_text(final["content"]) and "tool_calls" not in final
    if body.cache_control is not None and final:
        final["content"] = with_marks(final["content"], {"cache_control": body.cache_control})
    if tool := next((marks_of(tool.model_extra) for tool in reversed(body.tools or [])), None):
        fields[TOOLS] = tool
    if continues:
        fields["continue_final_message"] = True
    fields["messages"] = messages
    shown = {"name", "description", "input_schema"}
    fields["tools"] = [tool.model_dump(include=shown) for tool in body.tools or ()] or None
    if body.tool_choice is not None:
        fields["tool_choice"] = {"name": ""} | body.tool_choice.model_dump(exclude_none=True)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.output_config is not None and body.output_config.effort is not None:
        fields["reasoning_effort"] = body.output_config.effort
    if isinstance(body, MessagesRequest):
        fields |= {"max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        form = (body.output_config and body.output_config.format) or body.output_format
        if form is not None:
            fields["response_format"] = {"type": form.type, "schema": form.schema_}
    return validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})


def _messages(message: protocol.InputMessage) -> list[dict[str, Any]]:
    """Converts one message to several: tool results come before the user's text."""
    if not isinstance(message.content, list):
        return [{"role": message.role, "content": message.content or ""}]
    parts: list[Mapping[str, Any]] = []
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.role}
    marks: dict[str, Any] = {}
    for part in message.content:
        match str(part.get("type")):
            case "thinking":
                thoughts = (own.get("reasoning_content"), part.get("thinking"))
                own["reasoning_content"] = "\n".join(str(thought) for thought in thoughts if thought)
            case "redacted_thinking":
                pass  # its content is encrypted
            case "tool_use":
                function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
                call = {"id": part.get("id"), "type": "function", "function": function}
                own.setdefault("tool_calls", []).append(call)
                marks |= marks_of(part)
            case "tool_result":
                content = with_marks(chat_content(part.get("content") or ""), part)
                results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content})
            case kind if kind.endswith(("_tool_use", "_tool_result")):  # of tools that other servers run
                value = part.get("input", part.get("content"))
                parts.append({"type": "text", "text": f"[{kind}] {json.dumps(value, ensure_ascii=False)}"})
            case _:
                parts.append(part)
    own["content"] = with_marks(chat_content(parts), marks)
    return [*results, *([own] if parts or len(own) > 2 else [])]


def _has_text(content: Any) -> bool:
    return any(part["text"] for part in content) if isinstance(content, list) else bool(content)


_DELTAS = {
    "reasoning": ("thinking", "thinking_delta"),
    "text": ("text", "text_delta"),
    "call": ("partial_json", "input_json_delta"),
}
"""By kind of block: the field with new text, and the type of its delta."""


class MessageWriter(BlocksWriter):
    """Writes the response to one request. `prompts`: the token ids of the conversation, in a list."""

    def __init__(
        self, context: ResponseContext, body: MessagesRequest, request: ChatRequest, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(ChatTurn(context, request, prompts[0], prefix="msg_"))
        self._model, self._marked = context.model, bool(client_marks(request, messages_of(request, context.omitted)))

    def _begin(self) -> list[NamedEvent]:
        return [("message_start", {"message": self._object([])})]

    def _change(self, what: BlockChange, block: Block, text: str = "") -> list[NamedEvent]:
        place = {"index": block.index}
        match what:
            case "begin":
                return [("content_block_start", place | {"content_block": _block(block)})]
            case "more":
                name, kind = _DELTAS[block.kind]
                return [("content_block_delta", place | {"delta": {"type": kind, name: text}})]
        signature = {"type": "signature_delta", "signature": _signature(block.text)}
        signed = [("content_block_delta", place | {"delta": signature})] if block.kind == "reasoning" else []
        return [*signed, ("content_block_stop", place)]

    def _end(self) -> list[NamedEvent]:
        return [("message_delta", {"delta": self._stop(), "usage": self._usage()}), ("message_stop", {})]

    def _whole(self) -> protocol.MessageObject:
        return self._object([_block(block) for block in self._blocks], **self._stop())

    def _stop(self) -> dict[str, Any]:
        assert self._last is not None
        stop, reason = self._last.stop_reason, "end_turn"
        if self._last.finish_reason == "length":
            reason = "max_tokens"
        elif self._reader.called:
            reason = "tool_use"
        elif isinstance(stop, str):
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": stop if reason == "stop_sequence" else None}

    def _object(self, content: list[protocol.ContentBlock], **end: Any) -> protocol.MessageObject:
        return protocol.MessageObject(
            id=self.job.request.request_id, model=self._model, content=content, usage=self._usage(), **end
        )

    def _usage(self) -> protocol.MessagesUsage:
        usage = self.job.usage()
        cached = usage.prompt_tokens_details.cached_tokens
        written = {ttl: count for ttl, count in self.job.written.items() if self._marked and ttl is not None}
        made, hour = sum(written.values()), sum(count for ttl, count in written.items() if ttl and ttl >= 3600)
        created = protocol.CacheCreation(ephemeral_5m_input_tokens=made - hour, ephemeral_1h_input_tokens=hour)
        return protocol.MessagesUsage(
            input_tokens=usage.prompt_tokens - cached - made,
            cache_creation=created,
            cache_creation_input_tokens=made,
            cache_read_input_tokens=cached,
            output_tokens=usage.completion_tokens,
        )


def _block(block: Block) -> protocol.ContentBlock:
    match block.kind:
        case "reasoning":
            return protocol.ThinkingBlock(thinking=block.text, signature=_signature(block.text) if block.text else "")
        case "text":
            return protocol.TextBlock(text=block.text)
    return protocol.ToolUseBlock(id=block.call_id, name=block.name, input=object_of(block.text, cut=True) or {})


def _signature(thinking: str) -> str:
    """Returns the signature of a thinking block. Clients send it back; the server does not check it."""
    return base64.b64encode(hashlib.blake2b(thinking.encode(errors="replace"), digest_size=24).digest()).decode()
