"""`mamba-jax serve`: load a model, listen, and answer."""

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
from serving.disagg.settings import SplitSettings

log = logging.getLogger(__name__)

_SERVER = "Server"
_KEY_VARIABLE = "MAMBA_JAX_API_KEY"
_DEFAULTS = {
    # A server has time before its first request, and no moment to spare after it.
    "warmup": True,
    # Without a bound, a crowd of clients is a queue that nobody waits for any more.
    "max_num_waiting": 4096,
    "enable_structured_outputs": True,
}
"""Engine flags whose defaults differ from the library's."""


def _option(name: str, *, spelling: str | None = None) -> Any:
    return typer.Option(
        spelling or f"--{name.replace('_', '-')}",
        help=ServerSettings.model_fields[name].description,
        rich_help_panel=_SERVER,
        show_default=False,
    )


def serve(
    *,
    host: Annotated[str | None, _option("host")] = None,
    port: Annotated[int | None, _option("port")] = None,
    served_model_name: Annotated[list[str] | None, _option("served_model_name")] = None,
    api_key: Annotated[list[str] | None, _option("api_key")] = None,
    max_body_bytes: Annotated[int | None, _option("max_body_bytes")] = None,
    max_choices: Annotated[int | None, _option("max_choices")] = None,
    tool_call_parser: Annotated[str | None, _option("tool_call_parser")] = None,
    drain_timeout: Annotated[float | None, _option("drain_timeout")] = None,
    log_format: Annotated[str | None, _option("log_format")] = None,
    log_requests: Annotated[bool | None, _option("log_requests", spelling="--log-requests/--no-log-requests")] = None,
    otlp_traces_endpoint: Annotated[str | None, _option("otlp_traces_endpoint")] = None,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            help="Take the checkpoint's recommended sampling for what requests leave out.",
            rich_help_panel=_SERVER,
        ),
    ] = True,
    flags: dict[str, Any],
    split: dict[str, Any] | None = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API. Listens on loopback unless told otherwise."""
    begin = time.monotonic()
    given = {
        "host": host,
        "port": port,
        "served_model_name": tuple(served_model_name) if served_model_name else None,
        "api_key": tuple(api_key) if api_key else None,
        "max_body_bytes": max_body_bytes,
        "max_choices": max_choices,
        "tool_call_parser": tool_call_parser,
        "drain_timeout": drain_timeout,
        "log_format": log_format,
        "log_requests": log_requests,
        "otlp_traces_endpoint": otlp_traces_endpoint,
    }
    role: SplitSettings = SplitSettings.create(**(split or {}))
    flags = role.engine_flags | flags
    settings, config = settle(flags, given, with_generation_config=generation_config)
    set_up_logging(settings.log_format)
    # Taken before minutes are spent on loading; connections wait until there is somebody to answer them.
    listening = bind(settings.host, settings.port)
    _run(settings, config, listening, begin, role)


def settle(
    flags: dict[str, Any], given: dict[str, Any], *, with_generation_config: bool = True
) -> tuple[ServerSettings, EngineConfig]:
    """Settings of the server and of the engine. `flags` come from the engine's options and the config file, which may
    also have the server's settings; `given` are those of the command line, and win.

    Raises:
        ConfigError: a bad value, or a model that does not exist.
    """
    from checkpoints import generation_config

    file = {name: flags.pop(name) for name in list(flags) if name in ServerSettings.model_fields}
    config = EngineConfig.create(**(_DEFAULTS | flags))
    values = file | {name: value for name, value in given.items() if value is not None}
    values.setdefault("served_model_name", (config.model if config.model == "demo" else Path(config.model).name,))
    if _KEY_VARIABLE in os.environ:
        values.setdefault("api_key", (os.environ[_KEY_VARIABLE],))
    if with_generation_config and "default_sampling" not in values:
        recommended = generation_config(config.model)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: getattr(recommended, name) for name in names}
        values["default_sampling"] = {name: value for name, value in found.items() if value is not None}
    return ServerSettings.create(**values), config


def bind(host: str, port: int) -> socket.socket:
    """A socket on that address, listening.

    Raises:
        ConfigError: the address cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind((host, port))
        made.listen()  # from now on nobody else can have it
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen on {host} port {port}: {getattr(error, 'strerror', None) or error}") from None
    return made


def _run(
    settings: ServerSettings, config: EngineConfig, listening: socket.socket, begin: float, role: SplitSettings
) -> None:
    import uvicorn

    from serving.api.http.app import create_app
    from serving.api.http.context import Context
    from serving.api.summary import summary
    from serving.api.traces import Traces
    from serving.disagg.http.roles import open_role
    from serving.engine.async_engine import AsyncEngine
    from serving.engine.build import build_engine
    from serving.engine.engine import Engine
    from serving.engine.warmup import warm_up

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

    app = create_app(
        AsyncEngine(built.engine),
        settings,
        routers=opened.routers,
        prepare=prepare,
        on_ready=on_ready,
        traces=traces,
    )
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="on",
            timeout_graceful_shutdown=max(1, round(settings.drain_timeout)),
        )
    )
    server.run(sockets=[listening])
