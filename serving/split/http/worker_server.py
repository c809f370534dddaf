"""One worker as a server: what `mamba-jax serve` runs, and what other programs run in a thread of theirs."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from functools import partial

from serving.api.http.app import create_app
from serving.api.http.context import Context
from serving.api.http.server import STEP_TIMEOUT, Server
from serving.api.http.settings import ServerSettings
from serving.api.traces import Traces
from serving.config import ConfigError, EngineConfig
from serving.engine.build import Built, build_engine
from serving.engine.engine import Engine
from serving.engine.replicas import serve_engines
from serving.engine.warmup import warm_up
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
    on_built: Callable[[Built], None] | None = None,
    on_compiled: Callable[[], None] | None = None,
    on_ready: Callable[[Context], None] | None = None,
) -> tuple[Server, Context]:
    """Loads the model and takes on the role; the server is to be run on `listening`, and compiles when it is.

    Args:
        settings: of the server.
        config: of the engine.
        role: of the worker in a fleet; none for a server that does everything itself.
        listening: the socket that others reach it by.
        progress: show bars for loading and compiling where stderr is a terminal.
        traces: where spans go; by the settings if None.
        led: other hosts do what this one does: see `build_engine`.
        on_built: called with the engine once the model is loaded.
        on_compiled: called on each engine's thread once it has nothing more to compile; requests wait until it returns.
        on_ready: called once requests are taken.

    Raises:
        ConfigError, CheckpointError: what is wrong with flags, model or memory.
    """
    if config.data_parallel_size > 1 and (role.role is not None or role.seal.secret):
        raise ConfigError(
            f"data_parallel_size {config.data_parallel_size}: workers of a split, and those that routers follow "
            "(--role, --split-secret), have one engine each; start one for each replica"
        )
    built = build_engine(config.model_copy(update={"warmup": False}), progress=progress, led=led)
    if on_built is not None:
        on_built(built)
    opened = open_role(role, built, settings.host, listening.getsockname()[1], keys=settings.api_key)

    def prepare(engine: Engine) -> None:
        if config.warmup:
            several = len(built.engines) > 1
            bar = progress and not several and sys.stderr.isatty()
            # A role's own programs are compiled for the present store, so no other compilation may run. With several
            # hosts, all would wait for the last one to compile a program.
            alone = role.role is None and not led
            label = f"replica {1 + built.engines.index(engine)} of {len(built.engines)}: " if several else ""
            warm_up(
                engine.loop, engine.vocab_size,
                progress=bar, keep=config.compilation_cache, background=alone, label=label,
            )  # fmt: skip
            opened.prepare()
        if on_compiled is not None:
            on_compiled()

    engine = serve_engines(built.engines)
    app = create_app(engine, settings, routers=opened.routers, prepare=prepare, on_ready=on_ready, traces=traces)
    server = Server(
        app, settings, drain_timeout=settings.drain_timeout, leave=partial(engine.shutdown, STEP_TIMEOUT),
        ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile, root_path=settings.root_path,
    )  # fmt: skip
    return server, app.state.context
