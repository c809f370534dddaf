"""`mamba-jax serve` and `mamba-jax router`: serve a model over HTTP, or route requests to such servers."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from checkpoints.errors import CheckpointError
from serving.api.http.settings import ServerSettings, resolve_settings
from serving.api.logs import set_up_logging
from serving.cli.options import Options, with_options
from serving.config import ConfigError, EngineConfig
from serving.hosts.settings import HostSettings
from serving.split.settings import RouterSettings, SplitSettings

if TYPE_CHECKING:
    from serving.hosts.host_group import HostGroup

log = logging.getLogger(__name__)

_SWITCH_SECONDS = 0.0005
"""How long a thread may keep the interpreter from another. Python's 5 ms are several steps of a small model, for which
the engine's thread would wait for threads that read and answer requests."""


@with_options(
    Options("settings", ServerSettings, "Server", without=("default_sampling",)),
    Options("flags", EngineConfig, "Engine"),
    Options("split", SplitSettings, "Prefill/decode split"),
    Options("hosts", HostSettings, "Several hosts"),
    config_file=True,
)
def serve(
    reference: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The same as --model.", show_default=False)
    ] = None,
    *,
    flags: dict[str, Any],
    settings: dict[str, Any],
    split: dict[str, Any] | None = None,
    hosts: dict[str, Any] | None = None,
) -> None:
    """Serve a model over HTTP with OpenAI's API. Listens on loopback only, unless --host is given."""
    begin = time.monotonic()
    role = SplitSettings.create(**(split or {}))
    flags = role.engine_flags | flags
    if reference is not None:
        flags["model"] = reference
    chosen, config = resolve_settings(flags, settings)
    _check_tls(chosen)
    set_up_logging(chosen.log_format)
    together = HostSettings.create(**(hosts or {}))
    if together.several:
        _serve_together(together, chosen, config, role, begin, all_devices="tensor_parallel_size" not in flags)
        return
    # Bind before spending minutes on loading; connections wait until the server is up.
    listening = bind(chosen.host, chosen.port)
    _run(chosen, config, listening, begin, role)


def _serve_together(
    hosts: HostSettings,
    settings: ServerSettings,
    config: EngineConfig,
    role: SplitSettings,
    begin: float,
    *,
    all_devices: bool,
) -> None:
    """Finds the other hosts, then lead or follow. `all_devices`: the number of devices was not specified."""
    from serving.compatibility import Deployment, check
    from serving.hosts.host import gather, run_follower

    check(Deployment(config, several_hosts=True, role=role.role, followed=role.followed))
    listening = bind(settings.host, settings.port) if hosts.host_id in (0, None) else None
    group, config = gather(hosts, config, all_devices=all_devices)
    if group is not None and not group.leads:
        if listening is not None:
            listening.close()
        run_follower(config, group)
        return
    listening = listening or bind(settings.host, settings.port)
    if group is None:
        _run(settings, config, listening, begin, role)
        return
    with group.ending_together((ConfigError, CheckpointError)):
        _run(settings, config, listening, begin, role, group)
    group.exit()


def _check_tls(settings: ServerSettings) -> None:
    """Raises `ConfigError` if key or certificate cannot be read, or they do not match."""
    if settings.ssl_certfile is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            settings.ssl_certfile, settings.ssl_keyfile, password=lambda: ""
        )
    except OSError as error:  # ssl.SSLError among them
        raise ConfigError(f"--ssl-certfile {settings.ssl_certfile}: cannot be used: {error}") from None


def bind(host: str, port: int) -> socket.socket:
    """Returns a listening socket on this address.

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
    settings: ServerSettings,
    config: EngineConfig,
    listening: socket.socket,
    begin: float,
    role: SplitSettings,
    group: HostGroup | None = None,
) -> None:
    """Runs the server until it is stopped. `group`: the hosts that this one leads."""
    from serving.api.http.app import make_server, startup_lines
    from serving.hosts.host import Leader
    from serving.split.http.roles import role_of

    sys.setswitchinterval(_SWITCH_SECONDS)
    leader: Leader | None = None
    scheme = "http" if settings.ssl_certfile is None else "https"
    address, port = listening.getsockname()[:2]

    def on_compiled() -> None:
        if leader is not None:
            leader.wait_until_ready()

    server, context, built = make_server(
        settings, config, open_role=role_of(role, config, settings, listening), led=group is not None,
        on_compiled=on_compiled, on_ready=lambda _: log.info("ready after %.1f s", time.monotonic() - begin),
    )  # fmt: skip
    for line in startup_lines(built, settings, f"{scheme}://{address}:{port}"):
        log.info(line)
    if group is not None:
        leader = Leader(built.engine.loop, group, built.digest)
        group.ignore_reraised_signals()
    server.run(sockets=[listening])
    if context.engine.abandoned:
        logging.shutdown()
        os._exit(1)  # a normal exit would wait for the step


# The router has no operators' paths.
@with_options(Options("settings", RouterSettings, "Router", without=("admin_key",)))
def router(*, settings: dict[str, Any]) -> None:
    """Put OpenAI's API in front of prefill and decode workers (`mamba-jax serve --role ...`)."""
    from serving.api.http.connection.server import Server
    from serving.split.router.app import create_router

    if not settings.get("decode"):
        raise ConfigError("a router needs at least one decode worker: --decode URL")
    chosen = RouterSettings.create(**settings)
    set_up_logging(chosen.log_format)
    for url in (*chosen.prefill, *chosen.decode):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not a URL: it must begin with http:// or https://")
    listening = bind(chosen.host, chosen.port)
    address, port = listening.getsockname()[:2]
    log.info(
        "routing http://%s:%d to %d prefill and %d decode workers",
        address, port, len(chosen.prefill), len(chosen.decode),
    )  # fmt: skip
    app = create_router(chosen)
    server = Server(app, chosen, drain_timeout=chosen.drain_timeout, leave=app.state.relay.leave)
    server.run(sockets=[listening])
