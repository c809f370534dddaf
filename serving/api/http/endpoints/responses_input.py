"""Converts a request for `/v1/responses` to one for `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from serving.api.http.errors import ApiError
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.responses import AllowedFunctions, NamedFunction, OutputItem, ResponsesRequest

_TEXT_PARTS = ("input_text", "output_text", "text")


def chat_request(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> ChatRequest:
    """Returns the chat request of `body`, for a conversation in its format.

    Raises:
        RequestValidationError: a field is invalid.
    """
    try:
        return ChatRequest.model_validate(chat_fields(body, messages))
    except ValidationError as error:
        raise RequestValidationError(error.errors()) from None


def chat_fields(body: ResponsesRequest, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the fields of the chat request."""
    fields: dict[str, Any] = {
        name: value for name, value in (body.model_extra or {}).items() if name in ChatRequest.model_fields
    }
    if body.instructions is not None:
        messages = [{"role": "system", "content": body.instructions}, *messages]
    fields |= {"model": body.model, "messages": list(messages), "stream": body.stream}
    fields["max_completion_tokens"] = body.max_output_tokens
    fields |= {"temperature": body.temperature, "top_p": body.top_p, "parallel_tool_calls": body.parallel_tool_calls}
    fields["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_unset=True)}
        for tool in body.tools or ()
    ] or None
    fields["tool_choice"] = _tool_choice(body.tool_choice)
    form = body.text.format
    if form.type == "json_schema":
        fields["response_format"] = {"type": form.type, "json_schema": {"name": form.name, "schema": form.schema_}}
    elif form.type == "json_object":
        fields["response_format"] = {"type": form.type}
    if body.wants_logprobs:
        fields |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
    if body.reasoning is not None and body.reasoning.effort is not None:
        fields["reasoning_effort"] = body.reasoning.effort
    return {name: value for name, value in fields.items() if value is not None}


def messages_of_input(items: str | Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Converts input items to messages. Reasoning items and calls become part of the assistant's message.

    Raises:
        ApiError: an item has an unsupported type.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[dict[str, Any]] = []
    for i, item in enumerate(items):
        match item.get("type", "message"):
            case "message":
                role = item.get("role")
                if not isinstance(role, str):
                    raise _wrong(i, "a message needs a role")
                content = _text(i, item.get("content"))
                if role == "assistant":
                    _assistant(messages)["content"] += content
                else:
                    messages.append({"role": "system" if role == "developer" else role, "content": content})
            case "reasoning":
                parts = item.get("content") or item.get("summary") or []
                if not isinstance(parts, list):
                    raise _wrong(i, "the content of a reasoning item must be a list")
                thought = "\n".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
                _assistant(messages, new=True)["reasoning_content"] = thought
            case "function_call":
                function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                _assistant(messages).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                content = _text(i, item.get("output"))
                messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
            case other:
                raise _wrong(i, f"items of type {str(other)[:40]!r} are not supported")
    return messages


def items_as_input(items: Sequence[OutputItem]) -> list[dict[str, Any]]:
    """Converts output items to input items of the next turn."""
    return [item.model_dump() for item in items]


def _assistant(messages: list[dict[str, Any]], *, new: bool = False) -> dict[str, Any]:
    """Returns the assistant's message at the end of the conversation; appends one if there is none."""
    if new or not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _text(i: int, content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = []
    if not isinstance(content, list | None):
        raise _wrong(i, "content must be a string or a list of parts")
    for part in content or ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise _wrong(i, f"content may hold text only, not {str(kind)[:40]!r}")
        parts.append(part["text"])
    return "\n".join(parts)


def _wrong(i: int, why: str) -> ApiError:
    return ApiError(400, f"input.{i}: {why}", param="input")


def _tool_choice(choice: Any) -> Any:
    match choice:
        case NamedFunction():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedFunctions():
            tools = [{"type": "function", "function": {"name": tool.name}} for tool in choice.tools]
            return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice
