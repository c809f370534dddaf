"""A fleet as a Ray Serve application: prefill and decode replicas behind the router.

    serve run serving.split.ray.app:application model=REF prefill=1-4 decode=2

Ray places and restarts the replicas, and determines their number (`autoscaling`). Each replica runs a whole worker with
its own port, because states and streams go from worker to worker and not through Ray. A registry contains the replicas'
addresses. The router, which is the ingress, reads the registry.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from serving.split.ray.arguments import Arguments
from serving.split.ray.autoscaling import METRIC, replicas
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
    """One worker in one Ray actor."""

    def __init__(self, role: str, fleet: str, split: dict[str, Any], flags: dict[str, Any]) -> None:
        from serving.split.ray.embedded import EmbeddedWorker

        settings = SplitSettings.create(role=role, **split)
        self.worker = EmbeddedWorker(settings, flags, ray.util.get_node_ip_address())
        self._role, self._registry, self._over = role, registry(fleet), threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        self._thread.start()

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns the metric for Serve's autoscaler."""
        return {METRIC: float(self.worker.requests)}

    def check_health(self) -> None:
        """Raises an error if the worker stopped; Ray then restarts the replica."""
        if not self.worker.alive:
            raise RuntimeError("the worker stopped")

    def __del__(self) -> None:
        # Serve does not know about running streams, so the replica lets them finish here.
        self._over.set()
        self._thread.join()
        self._registry.leave.remote(self._role, self.worker.url)
        time.sleep(2 * _BEAT)  # until the router has read the registry
        self.worker.close(_DRAIN)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            if self.worker.ready:
                ray.get(self._registry.beat.remote(self._role, self.worker.url))


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
