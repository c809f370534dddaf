"""The application: routers over one context.

    app = create_app(AsyncEngine(engine), ServerSettings.create(port=8000))

Other roles plug in as routers of their own: `create_app(..., routers=[prefill_router])`. A handler gets the engine
and everything else by `context_of(request)`, runs `await context.engine.call(function)` on the engine's thread, and
raises `ApiError`; limits, keys, logs and metrics apply to it as to all others.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import hashlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from serving.api.http import absent, admin, chat, completions, errors, messages, rollouts, tokenization
from serving.api.http.context import Context
from serving.api.http.limits import Limits
from serving.api.http.profiling import profiling_router
from serving.api.http.response_store import ResponseStore
from serving.api.http.responses import responses_router
from serving.api.http.server import STEP_TIMEOUT
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.async_engine import EngineStopped
from serving.engine.replicas import Served

log = logging.getLogger(__name__)


def create_app(
    engine: Served,
    settings: ServerSettings | None = None,
    *,
    routers: Sequence[APIRouter] = (),
    prepare: Callable[[Any], None] | None = None,
    on_ready: Callable[[Context], None] | None = None,
    traces: Traces | None = None,
) -> FastAPI:
    """An ASGI application that serves one engine, or replicas of one. The end of its lifespan shuts the engine down.

    Args:
        engine: not used by any other server.
        settings: the defaults are those of the command line.
        routers: further endpoints, for example those of a role.
        prepare: runs on each engine's thread before the first request is taken: compiles what is needed.
        on_ready: called once requests are taken.
        traces: where spans go; by the settings if None.
    """
    settings = settings or ServerSettings.create()
    metrics = Metrics(settings.served_model_name[0], vllm_names=settings.vllm_metrics)
    traces = traces or Traces(settings.otlp_traces_endpoint, settings.served_model_name[0])
    codec = TextCodec(engine.engine.tokenizer, engine.engine.max_model_len)
    context = Context(engine, settings, metrics, traces, codec)

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
        version=admin.program_version(),
        description="OpenAI's API over a hybrid Mamba2/attention model.",
        lifespan=lifespan,
    )
    app.state.context = context
    app.add_middleware(Limits, bounds=settings, metrics=metrics)
    if settings.allowed_origins:  # added last, and so in front: refusals can be read by pages, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
        )
    errors.install(app)
    profiling = profiling_router(settings.profile_dir, settings.profile_timeout)
    stored = responses_router(ResponseStore(settings.max_stored_responses, settings.max_stored_bytes))
    texts = (completions.router, chat.router, stored, messages.router, tokenization.router)
    for router in (*texts, admin.router, rollouts.router, profiling, absent.router, *routers):
        app.include_router(router)
    page = files("serving.api").joinpath("static/index.html").read_text(encoding="utf-8")
    headers = page_headers(page)

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return app


def page_headers(page: str) -> dict[str, str]:
    """What a browser may do with a page of ours: run its own script, talk to this server, and nothing else."""
    scripts = (hashlib.sha256(text.encode()).digest() for text in re.findall(r"<script>(.*?)</script>", page, re.S))
    hashes = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Frame-Options": "DENY",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }


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
        await asyncio.to_thread(context.engine.shutdown)  # /health says so from now on
        return
    # All that was loaded stays: a collection that looks at it again, in the middle of a request, takes a second.
    gc.collect()
    gc.freeze()
    context.ready = True
    if on_ready is not None:
        on_ready(context)
