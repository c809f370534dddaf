"""A worker inside another program's process: what `mamba-jax serve --role ...` runs, in a thread."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

import uvicorn

from checkpoints import generation_config
from serving.api.http.app import create_app
from serving.api.http.settings import ServerSettings
from serving.config import EngineConfig
from serving.engine.async_engine import AsyncEngine
from serving.engine.build import build_engine
from serving.engine.warmup import warm_up
from serving.split.http.peer import KEY_VARIABLE
from serving.split.http.roles import open_role
from serving.split.settings import SplitSettings

_DEFAULTS = {"warmup": True, "max_num_waiting": 4096, "enable_structured_outputs": True}
"""As of `mamba-jax serve`."""


class EmbeddedWorker:
    """Loads its model and listens on a free port of `host`; ready some time later.

    Raises:
        ConfigError, CheckpointError: as on the command line.
    """

    def __init__(self, split: SplitSettings, flags: dict[str, Any], host: str) -> None:
        config = EngineConfig.create(**(_DEFAULTS | split.engine_flags | flags))
        built = build_engine(config.model_copy(update={"warmup": False}), progress=False)
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self.url = f"http://{host}:{port}"
        role = open_role(split, built, host, port)

        def prepare(engine: Any) -> None:
            if config.warmup:
                warm_up(engine.loop, engine.vocab_size, progress=False)
                role.prepare()

        name = "demo" if config.model == "demo" else config.model.rstrip("/").rpartition("/")[2]
        settings = ServerSettings.create(
            host=host,
            served_model_name=name,
            log_requests=False,
            api_key=os.environ.get(KEY_VARIABLE),
            default_sampling=_recommended(config.model),
        )
        app = create_app(AsyncEngine(built.engine), settings, routers=role.routers, prepare=prepare)
        self._context = app.state.context
        self._server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, lifespan="on"))
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
        return int(self._context.engine.engine.num_unfinished)

    def close(self, seconds: float = 30.0) -> None:
        """Stop listening; what runs has some time to end."""
        self._server.should_exit = True
        self._thread.join(seconds)


def _recommended(model: str) -> dict[str, Any]:
    """The checkpoint's own sampling, for what requests leave out."""
    found = generation_config(model)
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: value for name in names if (value := getattr(found, name)) is not None}
