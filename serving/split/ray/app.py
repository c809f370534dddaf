"""A fleet as a Ray Serve application: prefill and decode replicas behind the router.

    serve run serving.split.ray.app:application model=REF prefill=1-4 decode=2

Ray places and restarts the replicas, and determines their number (`options.wanted`). Each replica runs a whole worker
with its own port, because states and streams go from worker to worker and not through Ray. A registry contains the
replicas' addresses. The router, which is the ingress, reads the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from serving.api.http.settings import resolve_settings
from serving.split.ray.options import METRIC, Arguments, replicas
from serving.split.settings import RouterSettings, SplitSettings

log = logging.getLogger(__name__)

_REGISTRY = "mamba-jax-workers-"
_BEAT = 1.0
_DEAD = 5.0  # seconds without a message after which a worker counts as dead
_DRAIN = 300.0  # seconds that a removed replica has to finish its requests


class Registry:
    """The current workers. Each one reports itself every second."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def beat(self, role: str, url: str) -> None:
        self._seen[role, url] = time.monotonic()

    def leave(self, role: str, url: str) -> None:
        """Removes a worker, which accepts no more requests."""
        self._seen.pop((role, url), None)

    def workers(self) -> dict[str, list[str]]:
        """Returns the URLs by role of the workers that reported recently."""
        late = time.monotonic() - _DEAD
        workers: dict[str, list[str]] = {"prefill": [], "decode": []}
        for (role, url), at in self._seen.items():
            if at > late:
                workers[role].append(url)
        return workers


def registry(fleet: str) -> Any:
    """Returns the registry of one application. Other applications in the same Ray cluster have their own."""
    actor: Any = ray.remote(num_cpus=0)(Registry)
    return actor.options(name=_REGISTRY + fleet, get_if_exists=True, lifetime="detached").remote()


class Replica:
    """One worker in one Ray actor: a server in a thread, equivalent to `mamba-jax serve --role ...`."""

    def __init__(self, role: str, fleet: str, split: dict[str, Any], flags: dict[str, Any]) -> None:
        from serving.api.http.make_server import make_server
        from serving.split.http.roles import role_of

        chosen, host = SplitSettings.create(role=role, **split), ray.util.get_node_ip_address()
        settings, config = resolve_settings({"log_requests": False} | chosen.engine_flags | flags, {"host": host})
        listening = socket.create_server((host, 0))
        opened = role_of(chosen, config, settings, listening)
        self._server, self._context = make_server(settings, config, listening, open_role=opened, progress=False)
        self._worker = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._worker.start()
        self._role, self._url = role, f"http://{host}:{listening.getsockname()[1]}"
        self._registry, self._over = registry(fleet), threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        self._beats.start()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metric for Serve's autoscaler."""
        return {METRIC: float(self._context.engine.num_unfinished)}

    def check_health(self) -> None:
        """Raises an error if the worker stopped; Ray then restarts the replica."""
        if not (self._worker.is_alive() and self._context.engine.running):
            raise RuntimeError("the worker stopped")

    def __del__(self) -> None:
        # Serve does not know about running streams, so the replica lets them finish here.
        self._over.set()
        self._beats.join()
        self._registry.leave.remote(self._role, self._url)
        time.sleep(2 * _BEAT)  # until the router has read the registry
        self._server.should_exit = True
        self._worker.join(_DRAIN)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            if self._context.ready:
                ray.get(self._registry.beat.remote(self._role, self._url))


def front(fleet: str, settings: dict[str, Any]) -> FastAPI:
    """Returns the router, which reads the fleet's registry."""
    from serving.split.router.app import create_router

    app = create_router(RouterSettings.create(**settings))
    inner = app.router.lifespan_context

    async def follow() -> None:
        workers = registry(fleet).workers
        while True:
            app.state.relay.fleet.follow(**await workers.remote())
            await asyncio.sleep(_BEAT)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with inner(app):
            following = asyncio.create_task(follow())
            yield
            following.cancel()

    app.router.lifespan_context = lifespan
    return app


class Front:
    """The ingress. Its references to the replicas make Ray deploy them with it."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._replicas = prefill, decode


def application(arguments: dict[str, Any]) -> Any:
    """Builds the application for `serve run`. `prefill` and `decode` are numbers of replicas, such as 2 or 1-4;
    `resources` are Ray's resources per replica, such as {"TPU": 4}. Settings of workers, their servers and the router
    (such as `lease`, `on_failure`, `api_key`) go to each part that has them; all others are flags of the engine.

    Raises:
        ConfigError: a number of replicas or a setting is invalid.
    """
    settings = Arguments.of(arguments)
    fleet = secrets.token_hex(8)
    options = {
        "ray_actor_options": {"num_cpus": 1, "resources": dict(arguments.get("resources", {}))},
        "graceful_shutdown_timeout_s": _DRAIN + 10,
    }
    parts = [
        serve.deployment(name=role, **replicas(role, arguments.get(role, 1), settings.engine), **options)(Replica).bind(
            role, fleet, settings.split, settings.server | settings.engine
        )
        for role in ("prefill", "decode")
    ]
    return serve.deployment(serve.ingress(lambda: front(fleet, settings.routing))(Front)).bind(*parts)
