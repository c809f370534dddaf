"""Converts a request for `/v1/messages` to one for `/v1/chat/completions`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from serving.api.http.errors import ApiError
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.messages import Conversation, InputMessage, MessagesRequest, Parts, ToolUse


def chat_request(body: Conversation) -> ChatRequest:
    """Returns the chat request.

    Raises:
        ApiError: a message has an unsupported part.
        RequestValidationError: a field is invalid.
    """
    fields: dict[str, Any] = {
        name: value for name, value in (body.model_extra or {}).items() if name in ChatRequest.model_fields
    }
    messages = [] if body.system is None else [{"role": "system", "content": _text("system", body.system)}]
    for i, message in enumerate(body.messages):
        messages += _messages(f"messages.{i}", message)
    fields |= {"model": body.model, "messages": messages}
    fields["tools"] = [
        {"type": "function",
         "function": {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}}
        for tool in body.tools or ()
    ] or None  # fmt: skip
    if body.tool_choice is not None:
        fields["tool_choice"] = _tool_choice(body.tool_choice)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    if body.thinking is not None:
        if body.thinking.type == "disabled":
            variables = fields.get("chat_template_kwargs") or {}
            fields["chat_template_kwargs"] = {"enable_thinking": False, **variables}
        fields["thinking_token_budget"] = body.thinking.budget_tokens
    if isinstance(body, MessagesRequest):
        fields |= {"stream": body.stream, "max_completion_tokens": body.max_tokens, "stop": body.stop_sequences}
        fields |= {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
        if body.output_config is not None and body.output_config.format is not None:
            schema = body.output_config.format.schema_
            fields["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": schema}}
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def _messages(where: str, message: InputMessage) -> list[dict[str, Any]]:
    """Converts one message to several: tool results come before the user's text."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    texts: list[str] = []
    results: list[dict[str, Any]] = []
    own: dict[str, Any] = {"role": message.role, "content": ""}
    for i, part in enumerate(message.content):
        here = f"{where}.content.{i}"
        match part.get("type"):
            case "text":
                texts.append(_text(here, [part]))
            case "thinking":
                own["reasoning_content"] = str(part.get("thinking", ""))
            case "redacted_thinking":
                pass  # its content is encrypted
            case "tool_use":
                function = {"name": part.get("name"), "arguments": json.dumps(part.get("input") or {})}
                call = {"id": part.get("id"), "type": "function", "function": function}
                own.setdefault("tool_calls", []).append(call)
            case "tool_result":
                content = part.get("content") or ""
                results.append(
                    {"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": _text(here, content)}
                )
            case other:
                raise _wrong(here, f"parts of type {str(other)[:40]!r} are not supported: text only")
    own["content"] = "\n".join(texts)
    return [*results, *([own] if texts or len(own) > 2 else [])]


def _text(where: str, content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise _wrong(where, "content must be a string or a list of text parts")
        parts.append(part["text"])
    return "\n".join(parts)


def _tool_choice(choice: ToolUse) -> Any:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name or ""}}
    return choice.type


def _wrong(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where}: {why}", param=where.partition(".")[0])
