"""A worker inside another program's process: what `mamba-jax serve --role ...` runs, in a thread."""

from __future__ import annotations

import socket
import threading
from typing import Any

from serving.api.http.settle import settle
from serving.split.http.worker_server import make_server
from serving.split.settings import SplitSettings


class EmbeddedWorker:
    """Loads its model and listens on a free port of `host`; ready some time later.

    Args:
        split: its role, and what goes with it.
        flags: of the engine, and settings of the server, as in a config file of `mamba-jax serve`.
        host: where it listens.

    Raises:
        ConfigError, CheckpointError: as on the command line.
    """

    def __init__(self, split: SplitSettings, flags: dict[str, Any], host: str) -> None:
        settings, config = settle({"log_requests": False} | split.engine_flags | flags, {"host": host})
        listening = socket.create_server((host, 0))
        self.url = f"http://{host}:{listening.getsockname()[1]}"
        self._server, self._context = make_server(settings, config, split, listening, progress=False)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._thread.start()

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return bool(self._context.ready)

    @property
    def alive(self) -> bool:
        """Whether it still serves, or will."""
        return self._thread.is_alive() and self._context.engine.running

    @property
    def requests(self) -> int:
        """Those that are under way, waiting ones included."""
        return int(self._context.engine.num_unfinished)

    def close(self, seconds: float = 30.0) -> None:
        """Stop listening; what runs has some time to end."""
        self._server.should_exit = True
        self._thread.join(seconds)
