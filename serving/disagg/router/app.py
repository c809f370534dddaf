"""The router as an application: OpenAI's API, passed on."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

import httpx
from fastapi import FastAPI, Request
from starlette.responses import Response

from serving.api.http import errors
from serving.api.http.errors import ApiError
from serving.api.http.streaming import ClientGone, EventStream, start, until_gone
from serving.disagg.http.peer import headers as own_key
from serving.disagg.router.relay import Relay
from serving.disagg.router.workers import Fleet
from serving.disagg.settings import RouterSettings

_PASSED_ON = ("authorization", "x-request-id")


def create_router(settings: RouterSettings) -> FastAPI:
    """An ASGI application in front of the workers that `settings` names."""
    timeout = httpx.Timeout(None, connect=settings.connect_timeout)
    client = httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=None))
    # Its own key is for what the router asks by itself. Clients' requests go on with the clients' keys, or with none.
    fleet = Fleet.of(settings.prefill, settings.decode, client, own_key())
    relay = Relay(fleet, settings)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        watching = asyncio.create_task(fleet.watch(settings.check_interval))
        yield
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await client.aclose()

    app = FastAPI(title="mamba-jax router", lifespan=lifespan)
    app.state.relay = relay
    errors.install(app)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _pass_on(relay, "completions", request)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _pass_on(relay, "chat/completions", request)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        for worker in fleet.decode:
            with contextlib.suppress(httpx.HTTPError):
                found = await client.get(f"{worker.url}/v1/models", headers=_headers(request), timeout=5.0)
                return Response(found.content, found.status_code, media_type="application/json")
        raise ApiError(503, "no decode worker is to be had", code="no_worker")

    @app.get("/health")
    @app.get("/ready")
    async def health() -> Response:
        up = any(worker.up for worker in fleet.decode)
        return Response(json.dumps({"ready": up}), 200 if up else 503, media_type="application/json")

    @app.get("/status")
    async def status() -> dict[str, Any]:
        return fleet.status() | {"relay": asdict(relay.stats)}

    return app


async def _pass_on(relay: Relay, kind: str, request: Request) -> Response:
    try:
        body = json.loads(await request.body())
    except ValueError:
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object")
    try:
        answer = await until_gone(request.receive, relay.answer(kind, body, _headers(request)))
    except ClientGone:
        return Response(status_code=499)
    if body.get("stream") and answer.status == 200:
        return EventStream(await start(answer.body), answer.headers)
    async with contextlib.aclosing(answer.body) as pieces:
        content = b"".join([piece async for piece in pieces])
    return Response(content, answer.status, answer.headers)


def _headers(request: Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name in _PASSED_ON}
