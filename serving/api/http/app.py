"""The ASGI application, all routers with one context; and a server of it with its engine, for `mamba-jax serve` and for
other programs, which run it in a thread.

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
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any

import jax
from fastapi import APIRouter, FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse

from mamba_jax.version import version
from serving.api.http import errors
from serving.api.http.apis import stored_responses
from serving.api.http.apis.text_api import respond, text_router
from serving.api.http.connection.keys import client_id
from serving.api.http.connection.server import STEP_TIMEOUT, Server, freeze_loaded
from serving.api.http.context import Context, ResponseStore
from serving.api.http.endpoints import operation, tokenization, updates
from serving.api.http.endpoints.operation import profiling_router
from serving.api.http.limits import Limits
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.assembly.build import AssembledEngine, build_engine
from serving.engine.assembly.devices import describe
from serving.engine.async_engine import AsyncEngine
from serving.engine.changes import load_adapter, table_of
from serving.engine.engine import Engine
from serving.engine.engine_thread import EngineStopped
from serving.engine.steps.warm_up import warm_up

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
            codec.close()
            await asyncio.to_thread(engine.shutdown, settings.drain_timeout + STEP_TIMEOUT)
            await asyncio.to_thread(context.traces.close)

    app = FastAPI(
        title="mamba-jax",
        version=version(),
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


@dataclass(frozen=True)
class Role:
    """What a worker of a fleet adds to its server."""

    routers: Sequence[APIRouter] = ()
    """The endpoints for other workers and routers."""
    prepare: Callable[[], None] | None = None
    """Compiles the role's programs for the store that the engine has now, on its thread. None: it has no programs."""


def make_server(
    settings: ServerSettings,
    config: EngineConfig,
    *,
    open_role: Callable[[AssembledEngine], Role] | None = None,
    progress: bool = True,
    led: bool = False,
    on_compiled: Callable[[], None] | None = None,
    on_ready: Callable[[Context], None] | None = None,
) -> tuple[Server, Context, AssembledEngine]:
    """Loads the model, which is returned with its engine. Run the returned server on a bound socket; it then compiles.

    Args:
        settings: the server's settings.
        config: the engine's settings.
        open_role: creates the role of a worker of a fleet, before the engine runs.
        progress: show progress bars for loading and compiling if stderr is a terminal.
        led: other hosts follow this one's steps; see `build_engine`.
        on_compiled: called on each engine's thread when its programs are compiled; requests wait until it returns.
        on_ready: called when the server accepts requests.

    Raises:
        ConfigError, CheckpointError: the flags are invalid, the model cannot be loaded, or memory does not suffice.
    """
    if settings.lora_modules and not config.adapter_flag:
        raise ConfigError("lora_modules needs enable_lora or max_initial_states")
    # Created before the model is loaded, because its package may be missing.
    traces = Traces(settings.otlp_traces_endpoint, settings.served_model_name[0])
    built = build_engine(config.model_copy(update={"warmup": False}), progress=progress, led=led)
    for name, path in settings.adapter_paths.items():
        try:
            adapter = table_of(built.engine).read(name, path)
            load_adapter(name, path, adapter, lambda function: list(map(function, built.engines)))
        except RequestError as error:
            raise ConfigError(str(error)) from None
    role = open_role(built) if open_role is not None else Role()

    def prepare(engine: Engine) -> None:
        if config.warmup:
            several = len(built.engines) > 1
            bar = progress and not several and sys.stderr.isatty()
            # Programs of a role are compiled for the current store, so no compilation may run in the background. With
            # several hosts, all would wait for the slowest background compilation.
            background = not led and role.prepare is None
            label = f"replica {1 + built.engines.index(engine)} of {len(built.engines)}: " if several else ""
            warm_up(
                engine.loop, engine.vocab_size,
                progress=bar, keep=config.compilation_cache, background=background, label=label,
            )  # fmt: skip
            if role.prepare is not None:
                role.prepare()
        if on_compiled is not None:
            on_compiled()

    engine = AsyncEngine(built.engines)
    app = create_app(engine, settings, routers=role.routers, prepare=prepare, on_ready=on_ready, traces=traces)
    server = Server(
        app, settings, drain_timeout=settings.drain_timeout, leave=partial(engine.shutdown, STEP_TIMEOUT),
        ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile, root_path=settings.root_path,
    )  # fmt: skip
    return server, app.state.context, built


def startup_lines(built: AssembledEngine, settings: ServerSettings, url: str) -> Iterator[str]:
    """Yields one line per topic: model, devices, kernels, sizes, cache, drafts and addresses."""
    config, model = built.config, built.model.config
    device = jax.devices()[0]
    scheduler = built.engine.loop.scheduler.config
    dtype = built.model.dtype
    yield f"model     {config.model} ({model.family}), {built.model.num_parameters:,} parameters, {dtype}"
    programs = built.engine.loop.programs
    meshes = [engine.loop.programs.mesh for engine in built.engines]
    yield f"device    {describe(meshes)} ({device.platform}), JAX {jax.__version__}"
    if programs.compilations:
        yield f"kernels   {programs.kernels.report().partition(': ')[2]}"
    each = ", each replica" if len(built.engines) > 1 else ""
    lengths = f"{scheduler.max_num_seqs} sequences of up to {scheduler.max_model_len:,} tokens"
    yield f"serves    {lengths}, {scheduler.max_num_batched_tokens:,} tokens a step{each}"
    slots, pages = scheduler.num_slots - 1, scheduler.usable_pages
    caching = f"mode {scheduler.cache_mode}" if scheduler.cache_mode != "none" else "off"
    yield f"caching   {caching}, {slots:,} state slots, {pages:,} pages of {scheduler.page_size} tokens{each}"
    source = config.speculative_model or config.speculative_method or "the model decides"
    drafts = f"{config.num_speculative_tokens} ({source})"
    yield f"drafts    {drafts if config.num_speculative_tokens else 'off'}"
    names = ", ".join(settings.served_model_name)
    yield f"clients   {url}/v1, model {names}, {'API key needed' if settings.api_key else 'no API key'}"
    yield f"status    {url}/ (status page), {url}/metrics"
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.api_key:
        yield "note      anyone who can reach this address can use the model; set --api-key to require a key"
