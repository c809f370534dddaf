"""The APIs that generate text: one row each. The server, the router, prefill workers and batch files read this table.

A new API is a row here, its models in `protocol`, and a file in this folder with its writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response

from checkpoints.errors import CheckpointError
from serving.api.http.apis import messages, responses
from serving.api.http.apis.blocks import BlocksWriter
from serving.api.http.apis.choices import ChatWriter, ChoicesWriter, CompletionWriter
from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.messages import MessageWriter
from serving.api.http.apis.responses import Conversation, ResponseWriter
from serving.api.http.connection import streaming
from serving.api.http.connection.keys import client_id, salt_of, sent_key
from serving.api.http.context import Context, ResponseContext, context_of
from serving.api.http.errors import OVERFLOW, ApiError, as_api_error
from serving.api.http.generation import ChoiceDelta, Job
from serving.api.http.protocol.chat import ChatRequest, ChatResponse
from serving.api.http.protocol.common import REFUSED_PATHS, ErrorResponse, TextRequest
from serving.api.http.protocol.completions import CompletionRequest, CompletionResponse
from serving.api.http.protocol.messages import MessageObject, MessagesRequest
from serving.api.http.protocol.responses import ResponseObject, ResponsesRequest
from serving.core.errors import RequestError
from serving.engine.requests.output import RequestOutput

Writer = ChoicesWriter | BlocksWriter
"""Writes the response to one request, whole or as events."""


@dataclass(frozen=True)
class TextApi:
    """One API."""

    path: str
    name: str
    description: str
    tag: str
    request: type[TextRequest]
    response: type[BaseModel]
    prompt_fields: tuple[str, ...]
    """Fields at the beginning of a prompt."""
    writer: Callable[[ResponseContext, Any, Any, Sequence[list[int]]], Writer]
    """Creates the writer of a request: in this API, in the format that `converted` returns, and its prompts."""
    converted: Callable[[Any, Conversation], ChatRequest | CompletionRequest] = lambda body, _: body
    """Returns a request in the format of one of the first two APIs."""
    failure: Callable[[ApiError], bytes] = streaming.openai_failure
    """Returns the last events of a stream that fails."""
    keep_alive: bytes = streaming.COMMENT
    """The event before the first one, while a request waits."""
    overflows_in_stream: bool = False
    """A stream whose prompt is too long begins, and fails: Codex shortens a conversation only then."""

    @property
    def kind(self) -> str:
        """The path below `/v1/`."""
        return self.path.removeprefix("/v1/")


_TABLE = (
    TextApi(
        "/v1/completions", "create_completion", "Continue one prompt or several", "OpenAI",
        CompletionRequest, CompletionResponse, ("prompt",), CompletionWriter,
    ),
    TextApi(
        "/v1/chat/completions", "create_chat_completion", "Answer a conversation", "OpenAI",
        ChatRequest, ChatResponse, ("messages",), ChatWriter,
    ),
    TextApi(
        "/v1/responses", "create_response", "Answer a conversation, or continue a stored one", "OpenAI",
        ResponsesRequest, ResponseObject, ("instructions", "input"), ResponseWriter, responses.as_chat,
        responses.failure, overflows_in_stream=True,
    ),
    TextApi(
        "/v1/messages", "create_message", "Answer a conversation", "Anthropic",
        MessagesRequest, MessageObject, ("system", "messages"), MessageWriter, lambda body, _: messages.as_chat(body),
        lambda error: streaming.named_event("error", {"error": error.anthropic_fields()}), streaming.PING,
    ),
)  # fmt: skip
TEXT_APIS = {api.kind: api for api in _TABLE}
_NAMES: Mapping[str | None, tuple[str, ...]] = {
    "messages": ("messages", "input"), "prompt": ("prompt", "messages", "input"),
    "logprobs": ("top_logprobs", "logprobs"), "stop": ("stop", "stop_sequences"),
    "structured_outputs": ("structured_outputs", "response_format", "text", "output_config", "output_format"),
    "max_tokens": ("max_completion_tokens", "max_tokens", "max_output_tokens"),
}  # fmt: skip
"""By the name of a field in errors: its names in requests."""


async def open_writer(api: TextApi, context: ResponseContext, body: TextRequest) -> Writer:
    """Checks a request, tokenizes its prompts, and returns the writer of its response.

    Raises:
        ApiError, RequestError, RequestValidationError: the request is invalid.
    """
    request = api.converted(body, context.conversation)
    prompts, marks = await tokenized(context, request)
    # A writer decodes prompts that it echoes.
    writer = await context.codec.run(sum(map(len, prompts)), lambda: api.writer(context, body, request, prompts))
    writer.job.request = replace(writer.job.request, cache_marks=marks, return_experts=request.return_token_ids)
    writer.job.check_size(context.codec.max_model_len, context.vocab_size, context.expert_bytes)
    return writer


def text_router(handle: Callable[[TextApi, TextRequest, Request], Awaitable[Response]]) -> APIRouter:
    """Returns the paths of all APIs, and those of other servers; `handle` answers the requests."""
    router = APIRouter()
    for api in _TABLE:
        _add(router, api, handle)
    for path, why in REFUSED_PATHS.items():
        router.add_api_route(path, partial(_refuse, why), methods=["POST"], include_in_schema=False)
    return router


async def _refuse(why: str) -> None:
    raise ApiError(404, why, code="not_supported")


def _add(
    router: APIRouter, api: TextApi, handle: Callable[[TextApi, TextRequest, Request], Awaitable[Response]]
) -> None:
    async def endpoint(body: Any, request: Request) -> Response:
        return await handle(api, body, request)

    endpoint.__annotations__["body"] = api.request
    router.add_api_route(
        api.path, endpoint, methods=["POST"], tags=[api.tag], response_model=api.response,
        name=api.name, description=f"{api.description}; with `stream` as server-sent events.",
        responses={400: {"model": ErrorResponse}} if api.tag == "OpenAI" else None,
    )  # fmt: skip


def overflow(api: TextApi, stream: bool, error: ApiError) -> Response:
    """Returns the stream that fails because its prompt is too long, where the API has one; raises other errors."""
    if not (stream and api.overflows_in_stream and error.code == OVERFLOW):
        raise error

    async def failing() -> AsyncGenerator[bytes, None]:
        yield api.failure(error)

    return streaming.EventStream(failing())


async def respond(api: TextApi, body: TextRequest, request: Request) -> Response:
    """Generates the response to `body`. Stops when the client disconnects.

    Raises:
        ApiError, RequestError: the request is invalid, or the server cannot serve it.
        ClientGone: the client has disconnected.
    """
    context, sent = context_of(request), body.model_fields_set
    context.check(body.model)
    given = body.model_extra.pop("kv_transfer_params", None) if context.transfer and body.model_extra else None
    if given is not None and context.transfer is not None:
        handed_over = await streaming.until_gone(
            request.receive, context.transfer(api.kind, body.num_continued, given, request)
        )
        if handed_over is not None:
            return handed_over

    async def opened() -> Writer:
        own = context.of_request(body.model, sent_key(request.headers))
        writer = await open_writer(api, own, body)
        await _compile_grammar(context, writer.job)
        return writer

    try:
        writer = await streaming.until_gone(request.receive, opened())
    except (ApiError, RequestError, CheckpointError) as error:
        refused = as_api_error(error)
        refused.param = next((name for name in _NAMES.get(refused.param, ()) if name in sent), refused.param)
        return overflow(api, body.stream, refused)
    job = writer.job
    request.state.reserve(job.score_bytes)
    salt = salt_of(job.request.cache_salt, request.headers, context.settings)
    job.request = replace(
        job.request, cache_salt=salt, lora_request=context.adapter_of(body.model), client=client_id(), live=body.stream
    )
    headers, request.state.job = streaming.ignored_header(body, job.ignored), job
    with context.traces.under(request.headers):
        outputs = _outputs(context, job)
        if body.stream:
            events, interval = writer.events(outputs), context.settings.sse_keep_alive_interval
            begun = await streaming.until_gone(request.receive, streaming.start(events, api.keep_alive, interval))
            return streaming.EventStream(begun, headers, api.failure)

        async def finished() -> list[ChoiceDelta]:
            return sorted([output async for output in outputs], key=lambda each: (each.prompt, each.new.index))

        pieces = await streaming.until_gone(request.receive, finished())
    codec = context.codec
    response = await codec.run(sum(piece.num_tokens for piece in pieces), lambda: writer.response(pieces))
    if streaming.is_long(response):
        parts = streaming.encoded(codec.run, response)
        return streaming.EventStream(parts, headers, lambda _: b"", media_type="application/json")
    return streaming.answer(response, headers)


async def _compile_grammar(context: Context, job: Job) -> None:
    """Compiles a job's grammar outside the event loop. The engine reuses it while the job holds a reference."""
    form, grammars = job.request.params.structured_outputs, context.engine.engine.grammars
    if form is None or grammars is None:
        return
    # Hashing a long schema takes time, as does a trial compilation. A known grammar does not wait for trials.
    pending = await asyncio.to_thread(grammars.submit, form, client_id())
    job.grammar = await asyncio.shield(asyncio.wrap_future(pending))  # others may wait for the same future


async def _outputs(context: Context, job: Job) -> AsyncGenerator[ChoiceDelta, None]:
    """Yields new output of all choices as it arrives. If the request is not live, yields each choice as a whole, when
    all choices of its prompt are finished. Updates `job`."""
    streams = [_one(context, job, index) for index in range(len(job.prompts))]
    async with contextlib.aclosing(streaming.merge(streams)) as outputs:
        async for index, output in outputs:
            job.add(index, output)
            for choice in output.outputs:
                if choice.token_ids or choice.text or choice.finished:
                    yield ChoiceDelta(index, output, choice)


async def _one(context: Context, job: Job, index: int) -> AsyncGenerator[RequestOutput, None]:
    """Runs one prompt, timed for the metrics and the traces."""
    ids, name = job.prompts[index], job.request.request_id
    observe = context.metrics.request(len(ids))
    request = replace(job.request, prompt={"prompt_token_ids": ids})
    if len(job.prompts) > 1:
        request = replace(request, request_id=f"{name}-{index}", batch_id=f"{name}-0")
    with context.traces.request(request.request_id, len(ids), request.params) as note:
        async with contextlib.aclosing(context.engine.stream(request)) as each:
            async for output in each:
                note(output)
                observe(output, time.monotonic())
                yield output
