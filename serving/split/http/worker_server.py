"""Creates a worker's server, for `mamba-jax serve` and for other programs, which run it in a thread."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial

from serving.api.http.app import create_app
from serving.api.http.connection.server import STEP_TIMEOUT, Server
from serving.api.http.context import Context
from serving.api.http.settings import ServerSettings
from serving.api.traces import Traces
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import AssembledEngine, build_engine
from serving.engine.async_engine import AsyncEngine
from serving.engine.engine import Engine
from serving.engine.programs.warmup import warm_up
from serving.engine.replicas.adapter_load import AdapterLoad, table_of
from serving.engine.replicas.group import grouped
from serving.engine.request_error import RequestError
from serving.split.http.roles import open_role
from serving.split.settings import SplitSettings


def make_server(
    settings: ServerSettings,
    config: EngineConfig,
    role: SplitSettings,
    listening: socket.socket,
    *,
    progress: bool = True,
    traces: Traces | None = None,
    led: bool = False,
    on_built: Callable[[AssembledEngine], None] | None = None,
    on_compiled: Callable[[], None] | None = None,
    on_ready: Callable[[Context], None] | None = None,
) -> tuple[Server, Context]:
    """Loads the model and creates the role. Run the returned server on `listening`; it then compiles.

    Args:
        settings: the server's settings.
        config: the engine's settings.
        role: the worker's role in a fleet, or no role.
        listening: the bound socket.
        progress: show progress bars for loading and compiling if stderr is a terminal.
        traces: exports spans; None for those of the settings.
        led: other hosts follow this one's steps; see `build_engine`.
        on_built: called with the engine when the model is loaded.
        on_compiled: called on each engine's thread when its programs are compiled; requests wait until it returns.
        on_ready: called when the server accepts requests.

    Raises:
        ConfigError, CheckpointError: the flags are invalid, the model cannot be loaded, or memory does not suffice.
    """
    if config.data_parallel_size > 1 and (role.role is not None or role.seal.secret):
        raise ConfigError(
            f"data_parallel_size {config.data_parallel_size}: workers of a split, and those that routers follow "
            "(--role, --split-secret), have one engine each; start one for each replica"
        )
    if settings.lora_modules and not config.serves_adapters:
        raise ConfigError("lora_modules needs enable_lora or max_initial_states")
    built = build_engine(config.model_copy(update={"warmup": False}), progress=progress, led=led)
    front = grouped(built.engines)
    for name, path in settings.adapter_paths.items():
        try:
            AdapterLoad(name, path, table_of(built.engine).read(name, path)).apply(front.call_all)
        except RequestError as error:
            raise ConfigError(str(error)) from None
    if on_built is not None:
        on_built(built)
    opened = open_role(role, built, settings.host, listening.getsockname()[1], keys=settings.api_key)

    def prepare(engine: Engine) -> None:
        if config.warmup:
            several = len(built.engines) > 1
            bar = progress and not several and sys.stderr.isatty()
            # Programs of a role are compiled for the current store, so no compilation may run in the background. With
            # several hosts, all would wait for the slowest background compilation.
            background = role.role is None and not led
            label = f"replica {1 + built.engines.index(engine)} of {len(built.engines)}: " if several else ""
            warm_up(
                engine.loop, engine.vocab_size,
                progress=bar, keep=config.compilation_cache, background=background, label=label,
            )  # fmt: skip
            opened.prepare()
        if on_compiled is not None:
            on_compiled()

    engine = AsyncEngine(front)
    app = create_app(engine, settings, routers=opened.routers, prepare=prepare, on_ready=on_ready, traces=traces)
    server = Server(
        app, settings, drain_timeout=settings.drain_timeout, leave=partial(engine.shutdown, STEP_TIMEOUT),
        ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile, root_path=settings.root_path,
    )  # fmt: skip
    return server, app.state.context
