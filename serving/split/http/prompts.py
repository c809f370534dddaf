"""A request's prompt as token ids, exactly as the worker that answers it will find them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from pydantic import ValidationError
from starlette.datastructures import Headers

from serving.api.http import messages_input, responses_input
from serving.api.http.chat_turn import messages_of, template_options
from serving.api.http.context import Context
from serving.api.http.errors import ApiError
from serving.api.http.generation import check_size
from serving.api.http.keys import salt_of
from serving.api.http.protocol.chat import ChatRequest
from serving.api.http.protocol.completions import CompletionRequest
from serving.api.http.protocol.messages import MessagesRequest
from serving.api.http.protocol.responses import ResponsesRequest

Kind = Literal["completions", "chat/completions", "responses", "messages"]
"""The path below `/v1`."""


class Prompt(NamedTuple):
    """What the engine is asked for, without how it is to go on."""

    tokens: list[int]
    priority: int
    salt: str | None


async def prompt_of(context: Context, kind: Kind, body: dict[str, Any], headers: Headers) -> Prompt:
    """The one prompt of a request. `headers` are those of the client.

    Raises:
        ApiError, RequestError: it is none that could be served, or has several.
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
            raise ApiError(400, "one prompt at a time can be computed for another worker", param="prompt")
        (given,) = request.prompts
        special = request.add_special_tokens is not False
        if isinstance(given, str):
            (prompt,) = await context.codec.encode([given], add_special_tokens=special)
        else:
            prompt = given
    check_size(context, [prompt], "messages" if isinstance(request, ChatRequest) else "prompt")
    salt = salt_of(request.cache_salt, headers, context.settings)
    return Prompt(list(prompt), request.priority, salt)


def _parsed(kind: Kind, body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    match kind:
        case "completions":
            return CompletionRequest.model_validate(body)
        case "chat/completions":
            return ChatRequest.model_validate(body)
        case "responses":
            asked = ResponsesRequest.model_validate(body)
            return responses_input.chat_request(asked, responses_input.messages_of_input(asked.input))
        case "messages":
            return messages_input.chat_request(MessagesRequest.model_validate(body))
