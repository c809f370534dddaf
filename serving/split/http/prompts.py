"""Converts a request's prompt to the same token ids that the answering worker computes."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import Headers

from serving.api.http.chat_turn import messages_of, template_options
from serving.api.http.connection.keys import salt_of
from serving.api.http.context import Context
from serving.api.http.endpoints import messages_input, responses_input
from serving.api.http.errors import ApiError
from serving.api.http.generation import check_size
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.protocol.messages import MessagesRequest
from serving.api.http.protocol.responses import ResponsesRequest
from serving.engine.requests.request import LoRARequest

Kind = Literal["completions", "chat/completions", "responses", "messages"]
"""The path below `/v1`."""


class Prompt(NamedTuple):
    """A request's prompt, priority, cache salt and adapter, without sampling parameters."""

    tokens: list[int]
    priority: int
    salt: str | None
    lora: LoRARequest | None = None


async def prompt_of(context: Context, kind: Kind, body: dict[str, Any], headers: Headers) -> Prompt:
    """Returns the prompt of a request. `headers`: the client's.

    Raises:
        ApiError, RequestError: the request is invalid, or has several prompts.
    """
    try:
        request = _parsed(kind, body)
    except ValidationError as error:
        first = error.errors()[0]
        raise ApiError(400, f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    context.check(request.model)
    if isinstance(request, ChatRequest):
        special = request.add_special_tokens is True
        options = template_options(request, context.settings.default_chat_template_kwargs)
        prompt = await context.codec.encode_chat(messages_of(request), add_special_tokens=special, **options)
    else:
        if len(request.prompts) != 1:
            raise ApiError(400, "prefill workers accept only one prompt per request", param="prompt")
        (item,) = request.prompts
        special = request.add_special_tokens is not False
        if isinstance(item, str):
            (prompt,) = await context.codec.encode([item], add_special_tokens=special)
        else:
            prompt = item
    check_size(context, [prompt], "messages" if isinstance(request, ChatRequest) else "prompt")
    salt = salt_of(request.cache_salt, headers, context.settings)
    return Prompt(list(prompt), request.priority, salt, context.adapter_of(request.model))


def _parsed(kind: Kind, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    match kind:
        case "completions":
            return CompletionRequest.model_validate(body)
        case "chat/completions":
            return ChatRequest.model_validate(body)
        case "responses":
            parsed = ResponsesRequest.model_validate(body)
            return responses_input.chat_request(parsed, responses_input.messages_of_input(parsed.input))
        case "messages":
            return messages_input.chat_request(MessagesRequest.model_validate(body))
