"""The router's ASGI application: forwards requests of OpenAI's and Anthropic's APIs to workers.

It applies the same limits as a server, and answers invalid requests itself, so that no worker is blamed for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

from serving.api.http import errors
from serving.api.http.apis.inputs import sampling_params
from serving.api.http.apis.text_api import TextApi, overflow, text_router
from serving.api.http.connection.server import freeze_loaded
from serving.api.http.connection.streaming import EventStream, start, until_gone
from serving.api.http.endpoints.tokenization import DetokenizeRequest, TokenizeRequest
from serving.api.http.errors import OVERFLOW, ApiError
from serving.api.http.limits import Limits
from serving.api.http.protocol.common import TextRequest
from serving.api.http.protocol.messages import Conversation
from serving.api.metrics import Metrics
from serving.split.http.peer import JSON
from serving.split.router.event_followers import EventFollowers
from serving.split.router.placement import ClientRequest
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings

_KEYS = ("authorization", "x-api-key")
_TRACING = ("x-request-id", "traceparent", "tracestate")
_MAX_FORWARDED_BYTES = 8192
"""Maximum size of all forwarded header values together; workers also limit the size of headers."""


def create_router(settings: RouterSettings) -> FastAPI:
    """Returns an ASGI application that forwards requests to the workers in `settings`."""
    # Every wait for a worker has its own deadline: see `Remote.attended`.
    timeout = httpx.Timeout(None, connect=settings.connect_timeout)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    client = httpx.AsyncClient(timeout=timeout, limits=limits, headers=JSON)
    fleet = Fleet(settings, client)
    following = EventFollowers(fleet) if settings.routing == "events" else None
    relay = Relay(fleet, following)
    metrics = Metrics("router")
    metrics.registry.register(relay)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        freeze_loaded()
        tasks = [asyncio.create_task(fleet.watch())]
        if following is not None:
            tasks.append(asyncio.create_task(following.follow(settings.check_interval)))
        yield
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.aclose()

    app = FastAPI(title="mamba-jax router", lifespan=lifespan)
    app.state.relay = relay
    app.add_middleware(Limits, bounds=settings, metrics=metrics)
    errors.install(app)

    async def forward(api: TextApi, body: TextRequest, request: Request) -> Response:
        sampling_params(api.converted(body, _stored_conversation), {})
        forwarded = ClientRequest(
            api.kind, await request.body(), await request.json(), _headers(request), body.num_continued
        )
        answer = await until_gone(request.receive, relay.answer(forwarded))
        if forwarded.stream and answer.status == 200:
            return EventStream(await start(answer.body), answer.headers, api.failure)
        async with contextlib.aclosing(answer.body) as pieces:
            content = b"".join([piece async for piece in pieces])
        if answer.status == 400 and OVERFLOW.encode() in content:
            told = json.loads(content)["error"]
            error = ApiError(400, told["message"], param=told.get("param"), code=told.get("code"))
            with contextlib.suppress(ApiError):
                return overflow(api, forwarded.stream, error)
        return Response(content, answer.status, answer.headers)

    app.include_router(text_router(forward))

    @app.get("/v1/responses/{response_id}")
    @app.delete("/v1/responses/{response_id}")
    async def stored_response(response_id: str) -> Response:
        raise ApiError(404, "the router does not store responses", code="response_not_found")

    async def ask(request: Request) -> Response:
        path = request.scope["route"].path
        forwarded = ClientRequest(path, await request.body(), {}, _headers(request))
        answer = await until_gone(request.receive, relay.ask(path, forwarded))
        return Response(answer.content, answer.status_code, media_type="application/json")

    @app.post("/v1/messages/count_tokens")
    async def count_tokens(body: Conversation, request: Request) -> Response:
        return await ask(request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest, request: Request) -> Response:
        return await ask(request)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
        return await ask(request)

    app.get("/v1/models")(ask)

    @app.get("/ping")
    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/ready")
    async def ready() -> Response:
        up = any(worker.up for worker in fleet.decode)
        return JSONResponse({"ready": up}, 200 if up else 503)

    @app.get("/metrics")
    async def get_metrics() -> Response:
        content, kind = metrics.exposition({})
        return Response(content, media_type=kind)

    @app.get("/status")
    async def status() -> dict[str, Any]:
        states = following.states() if following is not None else {}
        return fleet.status() | {"relay": asdict(relay.stats), "placement": relay.placement.status(), "states": states}

    return app


def _stored_conversation(_: str) -> Sequence[dict[str, Any]]:
    raise ApiError(
        400, "the router does not store responses; send the whole conversation as input", param="previous_response_id"
    )


def _headers(request: Request) -> dict[str, str]:
    """Returns the headers to forward, without optional white space and without tracing headers that HTTP clients refuse
    to send. Raises ApiError: 400 for such characters in a key; 431 for values that are too long."""
    forwarded: dict[str, str] = {}
    for name in (*_KEYS, *_TRACING):
        value = request.headers.get(name, "").strip(" \t")
        if not value:
            continue
        if value.isascii() and value.isprintable():
            forwarded[name] = value
        elif name in _KEYS:
            raise ApiError(400, f"the header {name} contains characters other than printable ASCII")
    if sum(map(len, forwarded.values())) > _MAX_FORWARDED_BYTES:
        names = ", ".join((*_KEYS, *_TRACING))
        raise ApiError(431, f"the headers {names} together are larger than {_MAX_FORWARDED_BYTES:,} bytes")
    return forwarded
