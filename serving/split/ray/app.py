"""The fleet as a Ray Serve application: N prefill and M decode replicas behind the router.

    serve run serving.split.ray.app:application model=REF prefill=1-4 decode=2

Ray places and restarts the replicas, and decides about their number (`autoscaling`). Each runs a whole worker, with a
port of its own, because states and streams go from worker to worker and not through Ray. A registry says where the
replicas are; the router, which is the ingress, follows it.
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
_DEAD = 5.0  # seconds without a word
_DRAIN = 300.0  # seconds in which a replica that is not needed any more may end what it has begun


class Registry:
    """Which workers there are: each says so every second."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], float] = {}

    def beat(self, role: str, url: str) -> None:
        self._seen[role, url] = time.monotonic()

    def leave(self, role: str, url: str) -> None:
        """It takes no more requests."""
        self._seen.pop((role, url), None)

    def workers(self) -> dict[str, list[str]]:
        """URLs by role, of those that have been heard of lately."""
        late = time.monotonic() - _DEAD
        found: dict[str, list[str]] = {"prefill": [], "decode": []}
        for (role, url), at in self._seen.items():
            if at > late:
                found[role].append(url)
        return found


def registry(fleet: str) -> Any:
    """The registry of one application: others in the same Ray cluster have workers of their own."""
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
        """For Serve's autoscaler."""
        return {METRIC: float(self.worker.requests)}

    def check_health(self) -> None:
        """Ray restarts the replica when this raises."""
        if not self.worker.alive:
            raise RuntimeError("the worker has stopped")

    def __del__(self) -> None:
        # Serve does not know of the streams that run here: it is this that lets them end.
        self._over.set()
        self._thread.join()
        self._registry.leave.remote(self._role, self.worker.url)
        time.sleep(2 * _BEAT)  # until the router knows
        self.worker.close(_DRAIN)

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            if self.worker.ready:
                ray.get(self._registry.beat.remote(self._role, self.worker.url))


def front(fleet: str, settings: dict[str, Any]) -> FastAPI:
    """The router, which follows the fleet's registry."""
    from serving.split.router.app import create_router

    app = create_router(RouterSettings.create(**settings))
    inner = app.router.lifespan_context

    async def follow() -> None:
        found = registry(fleet)
        while True:
            app.state.relay.fleet.follow(**await found.workers.remote())
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
    """The ingress. It holds the replicas' handles so that Ray deploys them along with it."""

    def __init__(self, prefill: Any, decode: Any) -> None:
        self._replicas = prefill, decode


def application(arguments: dict[str, Any]) -> Any:
    """Built by `serve run`: `prefill` and `decode` are numbers of replicas, such as 2 or 1-4, `resources` Ray's for
    each of them (such as {"TPU": 4}). Settings of workers, of their servers and of the router (such as `lease`,
    `on_failure`, `api_key`) go to all who have them; everything else are flags of the engine.

    Raises:
        ConfigError: a number of replicas that is none, or a bad setting.
    """
    sorted_out = Arguments.of(arguments)
    fleet = secrets.token_hex(8)
    options = {
        "ray_actor_options": {"num_cpus": 1, "resources": dict(arguments.get("resources", {}))},
        "graceful_shutdown_timeout_s": _DRAIN + 10,
    }
    parts = [
        serve.deployment(name=role, **replicas(role, arguments.get(role, 1), sorted_out.engine), **options)(
            Replica
        ).bind(role, fleet, sorted_out.split, sorted_out.server | sorted_out.engine)
        for role in ("prefill", "decode")
    ]
    return serve.deployment(serve.ingress(lambda: front(fleet, sorted_out.routing))(Front)).bind(*parts)
