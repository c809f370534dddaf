"""`mamba-jax serve`: load a model and serve it over HTTP."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.api.http.settings import ServerSettings
from serving.api.logs import set_up_logging
from serving.config import ConfigError, EngineConfig
from serving.split.settings import SplitSettings

log = logging.getLogger(__name__)

PANEL = "Server"
_KEY_VARIABLES = {"api_key": "MAMBA_JAX_API_KEY", "admin_key": "MAMBA_JAX_ADMIN_KEY"}
_DEFAULTS = {
    # Compile before the first request rather than during it.
    "warmup": True,
    # Without a limit, overload becomes a queue of requests whose clients have given up.
    "max_num_waiting": 4096,
    # Somebody is reading what the running requests write.
    "max_decode_pause": 0.2,
    "enable_structured_outputs": True,
}
"""Engine flags whose defaults differ from the library's."""


def serve(
    *,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            help="Use the checkpoint's recommended sampling parameters for what requests leave out.",
            rich_help_panel=PANEL,
        ),
    ] = True,
    flags: dict[str, Any],
    settings: dict[str, Any],
    split: dict[str, Any] | None = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Listens on loopback only, unless --host is given."""
    begin = time.monotonic()
    role: SplitSettings = SplitSettings.create(**(split or {}))
    flags = role.engine_flags | flags
    chosen, config = settle(flags, settings, with_generation_config=generation_config)
    set_up_logging(chosen.log_format)
    # Bind before spending minutes on loading; connections wait until the server is up.
    listening = bind(chosen.host, chosen.port)
    _run(chosen, config, listening, begin, role)


def settle(
    flags: dict[str, Any], given: dict[str, Any], *, with_generation_config: bool = True
) -> tuple[ServerSettings, EngineConfig]:
    """Settings of the server and of the engine. `flags` come from the engine's options and the config file, which may
    also hold server settings; `given` come from the command line and take precedence.

    Raises:
        ConfigError: a bad value, or a model that does not exist.
    """
    from checkpoints import generation_config

    file = {name: flags.pop(name) for name in list(flags) if name in ServerSettings.model_fields}
    config = EngineConfig.create(**(_DEFAULTS | flags))
    values = file | {name: value for name, value in given.items() if value is not None}
    values.setdefault("served_model_name", (config.model if config.model == "demo" else Path(config.model).name,))
    for setting, variable in _KEY_VARIABLES.items():
        if variable in os.environ:
            values.setdefault(setting, (os.environ[variable],))
    if with_generation_config and "default_sampling" not in values:
        recommended = generation_config(config.model)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: getattr(recommended, name) for name in names}
        values["default_sampling"] = {name: value for name, value in found.items() if value is not None}
    return ServerSettings.create(**values), config


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address, listening.

    Raises:
        ConfigError: the address is not available.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None
    return made


def _run(
    settings: ServerSettings, config: EngineConfig, listening: socket.socket, begin: float, role: SplitSettings
) -> None:
    from serving.api.http.app import create_app
    from serving.api.http.context import Context
    from serving.api.http.server import Server
    from serving.api.http.summary import summary
    from serving.api.traces import Traces
    from serving.engine.async_engine import AsyncEngine
    from serving.engine.build import build_engine
    from serving.engine.engine import Engine
    from serving.engine.warmup import warm_up
    from serving.split.http.roles import open_role

    traces = Traces(settings.otlp_traces_endpoint, settings.served_model_name[0])
    built = build_engine(config.model_copy(update={"warmup": False}))
    address, port = listening.getsockname()[:2]
    for line in summary(built, settings, f"http://{address}:{port}"):
        log.info(line)

    opened = open_role(role, built, settings.host, port)

    def prepare(engine: Engine) -> None:
        if config.warmup:
            terminal = sys.stderr.isatty()
            warm_up(engine.loop, engine.vocab_size, progress=terminal, keep=config.compilation_cache)
            opened.prepare()

    def on_ready(_: Context) -> None:
        log.info("ready after %.1f s", time.monotonic() - begin)

    engine = AsyncEngine(built.engine)
    app = create_app(
        engine,
        settings,
        routers=opened.routers,
        prepare=prepare,
        on_ready=on_ready,
        traces=traces,
    )
    server = Server(app, settings, drain_timeout=settings.drain_timeout, leave=engine.shutdown)
    server.run(sockets=[listening])
