"""`mamba-jax serve`: load a model and serve it over HTTP."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from serving.api.http.settings import ServerSettings
from serving.api.logs import set_up_logging
from serving.cli.vllm.flags import json_value
from serving.config import ConfigError, EngineConfig
from serving.engine.request_error import RequestError
from serving.engine.sampling_params import SamplingParams
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
    reference: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    *,
    generation_config: Annotated[
        bool,
        typer.Option(
            "--generation-config/--no-generation-config",
            help="Use the checkpoint's recommended sampling parameters for what requests leave out.",
            rich_help_panel=PANEL,
        ),
    ] = True,
    override_generation_config: Annotated[
        str | None,
        typer.Option(
            help="Sampling parameters for what requests leave out, as JSON, in place of the checkpoint's.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    default_chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            help="Variables of the chat template for what requests leave out, as JSON: '{\"enable_thinking\": false}'.",
            rich_help_panel=PANEL,
        ),
    ] = None,
    flags: dict[str, Any],
    settings: dict[str, Any],
    split: dict[str, Any] | None = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Listens on loopback only, unless --host is given."""
    begin = time.monotonic()
    role: SplitSettings = SplitSettings.create(**(split or {}))
    flags = role.engine_flags | flags
    if reference is not None:
        flags["model"] = reference
    if default_chat_template_kwargs is not None:
        settings["default_chat_template_kwargs"] = _json_object(
            "--default-chat-template-kwargs", default_chat_template_kwargs
        )
    override = _json_object("--override-generation-config", override_generation_config or "{}")
    chosen, config = settle(flags, settings, with_generation_config=generation_config, override=override)
    _check_tls(chosen)
    set_up_logging(chosen.log_format)
    # Bind before spending minutes on loading; connections wait until the server is up.
    listening = bind(chosen.host, chosen.port)
    _run(chosen, config, listening, begin, role)


def settle(
    flags: dict[str, Any],
    given: dict[str, Any],
    *,
    with_generation_config: bool = True,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[ServerSettings, EngineConfig]:
    """Settings of the server and of the engine. `flags` come from the engine's options and the config file, which may
    also hold server settings; `given` come from the command line and take precedence. `override` has sampling
    parameters that take the place of the checkpoint's.

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
    if override:
        try:
            SamplingParams.of(override)
        except RequestError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None
        values["default_sampling"] = {**values.get("default_sampling", {}), **override}
    return ServerSettings.create(**values), config


def _json_object(name: str, text: str) -> dict[str, Any]:
    found = json_value(name, text)
    if not isinstance(found, dict):
        raise ConfigError(f"{name}: a JSON object is needed, not {text[:80]}")
    return found


def _check_tls(settings: ServerSettings) -> None:
    """Raises ConfigError: key and certificate cannot be read, or are not a pair."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=lambda: ""
        )
    except OSError as error:  # ssl.SSLError among them
        raise ConfigError(f"--ssl-certfile {settings.ssl_certfile}: cannot be used: {error}") from None


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
    scheme = "http" if settings.ssl_certfile is None else "https"
    address, port = listening.getsockname()[:2]
    for line in summary(built, settings, f"{scheme}://{address}:{port}"):
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
    server = Server(
        app, settings, drain_timeout=settings.drain_timeout, leave=engine.shutdown,
        ssl_keyfile=settings.ssl_keyfile, ssl_certfile=settings.ssl_certfile, root_path=settings.root_path,
    )  # fmt: skip
    server.run(sockets=[listening])
