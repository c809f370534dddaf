"""The prompt of a client's request, on a prefill worker and for the router, which do not generate its response."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from pydantic import AfterValidator
from starlette.datastructures import Headers

from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.stored_responses import stored_conversation
from serving.api.http.apis.text_api import TEXT_APIS
from serving.api.http.connection.keys import salt_of, sent_key
from serving.api.http.context import Context
from serving.api.http.errors import ApiError, validated
from serving.engine.requests.request import LoRARequest


def _known(kind: str) -> str:
    if kind not in TEXT_APIS:
        raise ValueError(f"must be one of {', '.join(TEXT_APIS)}")
    return kind


ApiKind = Annotated[str, AfterValidator(_known)]
"""The path below `/v1/`, a key of `TEXT_APIS`."""


class WorkerPrompt(NamedTuple):
    """A request's prompt, priority, cache salt and adapter, without sampling parameters."""

    tokens: list[int]
    priority: int
    salt: str | None
    lora: LoRARequest | None = None


async def prompt_of(context: Context, kind: str, body: dict[str, Any], headers: Headers) -> WorkerPrompt:
    """Returns the prompt of a request. `headers`: the client's.

    Raises:
        ApiError, RequestError, RequestValidationError: the request is invalid, or has several prompts.
    """
    api = TEXT_APIS[kind]
    parsed = validated(api.request, body)
    context.check(parsed.model)
    own = context.of_request(parsed.model, sent_key(headers))
    request = api.converted(parsed, stored_conversation(own))
    prompts = await tokenized(own, request)
    if len(prompts) != 1:
        raise ApiError(400, "prefill workers accept only one prompt per request", param="prompt")
    salt = salt_of(request.cache_salt, headers, context.settings)
    return WorkerPrompt(prompts[0], request.priority, salt, context.adapter_of(parsed.model))
