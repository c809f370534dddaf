"""The application: routers over one context.

    app = create_app(AsyncEngine(engine), ServerSettings.create(port=8000))

Other roles plug in as routers of their own: `create_app(..., routers=[prefill_router])`. A handler gets the engine
and everything else by `context_of(request)`, runs `await context.engine.call(function)` on the engine's thread, and
raises `ApiError`; limits, keys, logs and metrics apply to it as to all others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.responses import HTMLResponse

from serving.api.http import admin, chat, completions, errors, tokenization
from serving.api.http.context import Context
from serving.api.http.limits import Limits
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.async_engine import AsyncEngine, EngineStopped

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
    """An ASGI application that serves one engine. The end of its lifespan shuts the engine down.

    Args:
        engine: serves nobody else.
        settings: the defaults are those of the command line.
        routers: further endpoints, for example those of a role.
        prepare: runs on the engine's thread before the first request is taken: compiles what is needed.
        on_ready: called once requests are taken.
        traces: where spans go; by the settings if None.
    """
    settings = settings or ServerSettings.create()
    metrics = Metrics(settings.served_model_name[0])
    traces = traces or Traces(settings.otlp_traces_endpoint, settings.served_model_name[0])
    context = Context(engine, settings, metrics, traces, TextCodec(engine.engine.tokenizer))

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        preparing = asyncio.create_task(_prepare(context, prepare, on_ready))
        try:
            yield
        finally:
            preparing.cancel()
            await asyncio.gather(preparing, return_exceptions=True)
            context.ready = False
            context.codec.close()
            await asyncio.to_thread(engine.shutdown)
            await asyncio.to_thread(context.traces.close)

    app = FastAPI(
        title="mamba-jax",
        version=admin.program_version(),
        description="OpenAI's API over a hybrid Mamba2/attention model.",
        lifespan=lifespan,
    )
    app.state.context = context
    app.add_middleware(Limits, settings=settings, metrics=metrics)
    errors.install(app)
    for router in (completions.router, chat.router, tokenization.router, admin.router, *routers):
        app.include_router(router)
    page = files("serving.api").joinpath("static/index.html").read_text(encoding="utf-8")

    @app.get("/", include_in_schema=False)
    async def status_page() -> HTMLResponse:
        return HTMLResponse(page)

    return app


async def _prepare(
    context: Context, prepare: Callable[[Any], None] | None, on_ready: Callable[[Context], None] | None
) -> None:
    try:
        if prepare is not None:
            await context.engine.call(prepare)
    except EngineStopped:
        return
    except Exception:
        log.exception("the model could not be made ready")
        await asyncio.to_thread(context.engine.shutdown)  # /health says so from now on
        return
    context.ready = True
    if on_ready is not None:
        on_ready(context)
