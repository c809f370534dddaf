"""A worker in a thread of another program's process, equivalent to `mamba-jax serve --role ...`."""

from __future__ import annotations

import socket
import threading
from typing import Any

from serving.api.http.make_server import make_server
from serving.api.http.settings import resolve_settings
from serving.split.http.roles import role_of
from serving.split.settings import SplitSettings


class EmbeddedWorker:
    """Loads a model and listens on a free port of `host`. Compiles in the background: see `ready`.

    Args:
        split: the worker's role and its settings.
        flags: flags of the engine and settings of the server, as in a config file of `mamba-jax serve`.
        host: address to listen on.

    Raises:
        ConfigError, CheckpointError: the same errors as on the command line.
    """

    def __init__(self, split: SplitSettings, flags: dict[str, Any], host: str) -> None:
        settings, config = resolve_settings({"log_requests": False} | split.engine_flags | flags, {"host": host})
        listening = socket.create_server((host, 0))
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        role = role_of(split, config, settings, listening)
        self._server, self._context = make_server(settings, config, listening, open_role=role, progress=False)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether the worker accepts requests."""
        return bool(self._context.ready)

    @property
    def alive(self) -> bool:
        """Whether the worker runs or is starting."""
        return self._thread.is_alive() and self._context.engine.running

    @property
    def requests(self) -> int:
        """Number of running and waiting requests."""
        return int(self._context.engine.num_unfinished)

    def close(self, seconds: float = 30.0) -> None:
        """Stops listening and waits up to `seconds` for running requests."""
        self._server.should_exit = True
        self._thread.join(seconds)
