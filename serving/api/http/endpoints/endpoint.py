"""The common part of endpoints that generate text."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from fastapi import Request
from pydantic import BaseModel
from starlette.responses import Response

from serving.api.http.connection.keys import salt_of
from serving.api.http.connection.streaming import EventStream, openai_failure, start, until_gone
from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.api.http.generation import Job, UsageCounter, run
from serving.api.http.protocol.common import WholeAnswer
from serving.engine.requests.output import RequestOutput


class HasIgnored(Protocol):
    """A request that lists its fields without effect."""

    @property
    def ignored(self) -> list[str]: ...


class GenerationRequest(HasIgnored, Protocol):
    """A request for text."""

    @property
    def model(self) -> str | None: ...

    @property
    def stream(self) -> bool: ...


Body = TypeVar("Body", bound=GenerationRequest)

IGNORED = "x-ignored-fields"
_NAMES = 16


class Writer(Protocol):
    """Writes the response to one request, whole or as events."""

    job: Job
    tally: UsageCounter

    def events(self, context: Context) -> AsyncGenerator[bytes, None]: ...

    def response(self, outputs: Sequence[RequestOutput]) -> BaseModel: ...


async def respond(
    body: Body,
    request: Request,
    writer_of: Callable[[Context, Body], Coroutine[Any, Any, Writer]],
    failure: Callable[[ApiError], bytes] = openai_failure,
) -> Response:
    """Generates the response to `body`. Stops when the client disconnects.

    `failure` creates the event for an error after the first event.

    Raises:
        ApiError, RequestError: the request is invalid, or the server cannot serve it.
        ClientGone: the client has disconnected.
    """
    context = context_of(request)
    context.check(body.model)
    writer = await until_gone(request.receive, writer_of(context, body))
    writer.job.cache_salt = salt_of(writer.job.cache_salt, request.headers, context.settings)
    writer.job.lora_request = context.adapter_of(body.model)
    headers, request.state.tally = ignored_header(body), writer.tally
    with context.traces.under(request.headers):
        if body.stream:
            return EventStream(await until_gone(request.receive, start(writer.events(context))), headers, failure)
        outputs = await until_gone(request.receive, run(context, writer.job))
    return answer(writer.response(outputs), headers)


def answer(model: BaseModel, headers: Mapping[str, str] | None = None) -> Response:
    """Returns `model` as JSON, with the fields that were set, or with all fields of a `WholeAnswer`."""
    content = model.model_dump_json(exclude_unset=not isinstance(model, WholeAnswer), by_alias=True)
    return Response(content, headers=headers, media_type="application/json")


def ignored_header(request: HasIgnored) -> dict[str, str]:
    """Returns a header with the names of fields without effect. Clients choose the names, so the header lists only
    harmless ones."""
    names = [name for name in request.ignored if re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name)]
    return {IGNORED: ",".join(names[:_NAMES])} if names else {}
