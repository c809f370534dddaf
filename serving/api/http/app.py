"""The ASGI application: all routers with one context.

    app = create_app(AsyncEngine(engine), ServerSettings.create(port=8000))

Other roles add their own routers: `create_app(..., routers=[worker_router(...)])`. A handler gets the engine and the
settings from `context_of(request)`, runs functions on the engine's thread with `await context.engine.call(function)`,
and raises `ApiError`. Limits, keys, logs and metrics apply to all handlers.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from serving.api.http import errors
from serving.api.http.apis import stored_responses
from serving.api.http.apis.text_api import respond, text_router
from serving.api.http.connection.keys import client_id
from serving.api.http.connection.server import STEP_TIMEOUT, freeze_loaded
from serving.api.http.context import Context
from serving.api.http.endpoints import operation, tokenization, updates
from serving.api.http.endpoints.operation import profiling_router
from serving.api.http.limits import Limits
from serving.api.http.response_store import ResponseStore
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine_thread import EngineStopped

log = logging.getLogger(__name__)


def create_app(
    engine: AsyncEngine,
    settings: ServerSettings | None = None,
    *,
    routers: Sequence[APIRouter] = (),
    prepare: Callable[[Any], None] | None = None,
    on_ready: Callable[[Context], None] | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """Creates an ASGI application that serves an engine or its replicas. The end of its lifespan shuts the engine down.

    Args:
        engine: the engine; no other server may use it.
        settings: None for the command line's defaults.
        routers: additional endpoints, for example those of a role.
        prepare: runs on each engine's thread before the server accepts requests, to compile programs.
        on_ready: called when the server accepts requests.
        traces: exports spans; None for those of the settings.
    """
    settings = settings or ServerSettings.create()
    metrics = Metrics(settings.served_model_name[0], vllm_names=settings.vllm_metrics)
    traces = traces or Traces(settings.otlp_traces_endpoint, settings.served_model_name[0])
    codec = TextCodec(engine.engine.tokenizer, engine.engine.max_model_len, client_id)
    store = ResponseStore(settings.max_stored_responses, settings.max_stored_bytes)
    context = Context(engine, settings, metrics, traces, codec, settings.adapter_paths, store)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        preparing = asyncio.create_task(_prepare(context, prepare, on_ready))
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            context.ready = False
            context.close()
            await asyncio.to_thread(engine.shutdown, settings.drain_timeout + STEP_TIMEOUT)
            await asyncio.to_thread(context.traces.close)

    app = FastAPI(
        title="mamba-jax",
        version=operation.program_version(),
        description="OpenAI's API over a hybrid Mamba2/attention model.",
        lifespan=lifespan,
    )
    app.state.context = context
    app.add_middleware(Limits, bounds=settings, metrics=metrics)
    if settings.allowed_origins:  # added last, so it runs first and pages can read refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    errors.install(app)
    profiling = profiling_router(settings.profile_dir, settings.profile_timeout)
    texts = (text_router(respond), stored_responses.router, tokenization.router)
    operators = (operation.router, updates.adapters, updates.rollouts, profiling)
    for router in (*texts, *operators, *routers):
        app.include_router(router)
    page = files("serving.api").joinpath("static/index.html").read_text(encoding="utf-8")
    headers = page_headers(page)

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return app


def page_headers(page: str) -> dict[str, str]:
    """Returns the headers that restrict the page to its own script and to requests to this server."""
    scripts = (hashlib.sha256(text.encode()).digest() for text in re.findall(r"<script>(.*?)</script>", page, re.S))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy, "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }  # fmt: skip


async def _prepare(
    context: Context, prepare: Callable[[Any], None] | None, on_ready: Callable[[Context], None] | None
) -> None:
    try:
        if prepare is not None:
            await context.engine.call_all(prepare)
    except EngineStopped:
        return
    except Exception:
        log.exception("the warm-up failed")
        await asyncio.to_thread(context.engine.shutdown)  # /health reports it from now on
        return
    freeze_loaded()
    context.ready = True
    if on_ready is not None:
        on_ready(context)
