"""`mamba-jax router`."""

from __future__ import annotations

import logging
import socket
from typing import Any

from serving.cli.options import Options, with_options
from serving.config import ConfigError
from serving.split.settings import RouterSettings

log = logging.getLogger(__name__)


# The router has no paths for operators.
@with_options(Options("settings", RouterSettings, "Router", without=("admin_key",)))
def router(*, settings: dict[str, Any]) -> None:
    """Put OpenAI's API in front of prefill and decode workers (`mamba-jax serve --role ...`)."""
    from serving.api.http.server import Server
    from serving.split.router.app import create_router

    if not settings.get("decode"):
        raise ConfigError("a router needs at least one decode worker: --decode URL")
    chosen = RouterSettings.create(**settings)
    for url in (*chosen.prefill, *chosen.decode):
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"{url!r} is not a URL: it must begin with http:// or https://")
    try:
        listening = socket.create_server((chosen.host, chosen.port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {chosen.host} port {chosen.port}: {error.strerror or error}") from None
    address, port = listening.getsockname()[:2]
    log.info(
        "routing http://%s:%d to %d prefill and %d decode workers",
        address, port, len(chosen.prefill), len(chosen.decode),
    )  # fmt: skip
    app = create_router(chosen)
    server = Server(app, chosen, drain_timeout=chosen.drain_timeout, leave=app.state.relay.leave)
    server.run(sockets=[listening])
