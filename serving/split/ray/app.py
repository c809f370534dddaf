"""A fleet as a Ray Serve application: prefill and decode replicas behind the router.

    serve run serving.split.ray.app:application model=REF prefill=1-4 decode=2

Ray places and restarts the replicas, and determines their number (`wanted`). Each replica runs a whole worker with its
own port, because states and streams go from worker to worker and not through Ray. A registry contains the replicas'
addresses. The router, which is the ingress, reads the registry.

Serve counts calls of its handles, but requests go from the router directly to the workers' ports. So each replica
reports its running and waiting `requests`, and `wanted` divides their sum by `target_ongoing_requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from serving.api.http.settings import ServerSettings, resolve_settings
from serving.config import ConfigError, EngineConfig
from serving.split.settings import RouterSettings, SplitSettings

log = logging.getLogger(__name__)

_FIXED = frozenset({"role", "advertise", "host", "port", "prefill", "decode", "resources", "kv_events_config"})
"""Settings that the application chooses itself, and KV events: replicas of one machine would share their port."""
METRIC = "requests"  # name of the metric that a replica reports
_TARGET_REQUESTS = {
    "prefill": 2.0,  # one request runs and one waits; another replica would compute a third one earlier
    "decode": 0.75,  # fraction of the batch rows
}
_REGISTRY = "mamba-jax-workers-"
_BEAT = 1.0
_DEAD = 5.0  # seconds without a message after which a worker counts as dead
_DRAIN = 300.0  # seconds that a removed replica has to finish its requests


@dataclass(frozen=True)
class Arguments:
    """Settings of workers, their servers, the router and the engines. Some settings have several recipients."""

    split: dict[str, Any]
    server: dict[str, Any]
    routing: dict[str, Any]
    engine: dict[str, Any]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Arguments:
        """Sorts the arguments of an application. Creates a secret unless one is given.

        Raises:
            ConfigError: an unknown setting or an invalid value.
        """
        named = {"split_secret": secrets.token_hex(32)} | {k: v for k, v in arguments.items() if k not in _FIXED}
        kinds: tuple[type[Any], ...] = (SplitSettings, ServerSettings, RouterSettings)
        split, server, routing = (
            {name: value for name, value in named.items() if name in kind.model_fields} for kind in kinds
        )
        engine = {name: value for name, value in named.items() if name not in {*split, *server, *routing}}
        # Validate here, so that errors do not appear only in a replica's log.
        for kind, part in zip(kinds, (split, server, routing), strict=True):
            kind.create(**part)
        EngineConfig.create(**engine)
        return cls(split, server, routing, engine)


def wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas, and no state. This is an autoscaling policy of Serve, whose
    `ray.serve.config.AutoscalingContext` it gets."""
    reported = (context.aggregated_metrics or {}).get(METRIC)
    if not reported:
        return context.target_num_replicas, {}  # no replica has started yet
    return max(1, math.ceil(sum(reported.values()) / context.config.target_ongoing_requests)), {}


def replicas(role: str, number: object, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a Serve deployment. `number`: number of replicas, or a range such as `1-4`.

    Raises:
        ConfigError: `number` is neither.
    """
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", str(number))
    if matched is None or not 1 <= int(matched[1]) <= int(matched[2] or matched[1]):
        raise ConfigError(f"{role} must be a number of replicas such as 2, or a range such as 1-4, got {number!r}")
    if matched[2] is None:
        return {"num_replicas": int(matched[1])}
    target = _TARGET_REQUESTS[role]
    if role == "decode":
        target *= EngineConfig.create(**flags).max_num_seqs
    return {
        "autoscaling_config": {
            "min_replicas": int(matched[1]),
            "max_replicas": int(matched[2]),
            "target_ongoing_requests": max(1.0, target),
            "metrics_interval_s": 2.0,
            "look_back_period_s": 20.0,
            # A worker takes a minute to start and loses its prefixes when it ends, so react slowly.
            "upscale_delay_s": 20.0,
            "downscale_delay_s": 600.0,
            "policy": {"policy_function": f"{__name__}:{wanted.__name__}"},
        }
    }


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
    import ray

    actor: Any = ray.remote(num_cpus=0)(Registry)
    return actor.options(name=_REGISTRY + fleet, get_if_exists=True, lifetime="detached").remote()


class Replica:
    """One worker in one Ray actor: a server in a thread, equivalent to `mamba-jax serve --role ...`."""

    def __init__(self, role: str, fleet: str, split: dict[str, Any], flags: dict[str, Any]) -> None:
        import ray

        from serving.api.http.app import make_server
        from serving.split.http.roles import role_of

        chosen, host = SplitSettings.create(role=role, **split), ray.util.get_node_ip_address()
        settings, config = resolve_settings({"log_requests": False} | chosen.engine_flags | flags, {"host": host})
        listening = socket.create_server((host, 0))
        opened = role_of(chosen, config, settings, listening)
        self._server, self._context, _ = make_server(settings, config, open_role=opened, progress=False)
        self._worker = threading.Thread(target=self._server.run, kwargs={"sockets": [listening]}, daemon=True)
        self._worker.start()
        self._get = ray.get
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
                self._get(self._registry.beat.remote(self._role, self._url))


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
    from ray import serve

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
