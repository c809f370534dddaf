"""Endpoints for operators and probes: models, health, readiness, load, version, metrics, status, settings, profiles."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import jax
from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from checkpoints.errors import one_line
from mamba_jax.version import version
from serving.api.http.connection.keys import admin_only
from serving.api.http.connection.streaming import answer
from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.api.http.protocol.common import ModelCard, ModelList
from serving.engine.assembly.devices import describe, own_devices
from serving.engine.engine import Engine

log = logging.getLogger(__name__)

router = APIRouter()

_CELLS = 1024
"""Maximum number of cells of a map. Maps of larger pools show every n-th id."""

_QUEUE, _ROWS = 1024, 16
"""Maximum number of waiting requests examined per engine, and of rows in the table of waiting requests."""


@router.get("/v1/models", response_model=ModelList, tags=["OpenAI"])
async def list_models(request: Request) -> Response:
    """The model under each of its names, and its adapters."""
    context = context_of(request)
    if "anthropic-version" in request.headers:
        cards = [_anthropic_card(context, name) for name in context.model_names]
        return JSONResponse({"data": cards, "first_id": cards[0]["id"], "last_id": cards[-1]["id"], "has_more": False})
    return answer(ModelList(object="list", data=[_card(context, n) for n in context.model_names]))


@router.get("/v1/models/{name:path}", response_model=ModelCard, tags=["OpenAI"])
async def get_model(name: str, request: Request) -> Response:
    """The model under one of its names."""
    context = context_of(request)
    if name not in context.model_names:
        raise ApiError(404, f"the model {name!r} does not exist", param="model", code="model_not_found")
    if "anthropic-version" in request.headers:
        return JSONResponse(_anthropic_card(context, name))
    return answer(_card(context, name))


@router.get("/ping", tags=["operation"])
@router.post("/ping", tags=["operation"])
@router.get("/health", tags=["operation"])
async def health(request: Request) -> Response:
    """200 while the engine runs and makes progress; restart the process otherwise."""
    context_of(request).check_alive()
    return JSONResponse({"status": "ok"})


@router.get("/ready", tags=["operation"])
async def ready(request: Request) -> Response:
    """200 when the server accepts requests: the programs of every step are compiled."""
    context_of(request).check(None)
    return JSONResponse({"status": "ready"})


@router.get("/load", tags=["operation"])
async def load(request: Request) -> dict[str, int]:
    """Number of unanswered requests."""
    return {"server_load": context_of(request).engine.num_unfinished}


@router.get("/server_info", tags=["operation"], dependencies=[Depends(admin_only)])
async def server_info(request: Request) -> dict[str, Any]:
    """Version, hardware and current settings, without keys."""
    context = context_of(request)
    scheduler = context.engine.engine.loop.scheduler.config
    sizes = {name: value for name, value in asdict(scheduler).items() if isinstance(value, int | float | str | None)}
    return {
        "version": version(),
        "hardware": hardware(context.engine.engines),
        "engine": sizes,
        "server": context.settings.model_dump(mode="json", exclude={"api_key", "admin_key"}),
    }


@router.post("/reset_prefix_cache", tags=["operation"], dependencies=[Depends(admin_only)])
async def reset_prefix_cache(request: Request) -> Response:
    """Drop all cached prefixes, on the devices and in the tiers. Running requests keep the state that they use."""
    await context_of(request).engine.call_all(lambda engine: engine.loop.scheduler.drop_cached())
    return JSONResponse({"status": "ok"})


@router.get("/version", tags=["operation"])
async def get_version() -> dict[str, str]:
    """The version of the program."""
    return {"version": version()}


@router.get("/metrics", tags=["operation"])
async def metrics(request: Request) -> Response:
    """All metrics, for Prometheus."""
    context = context_of(request)
    body, kind = context.metrics.exposition(context.engine.latest_stats)
    return Response(body, media_type=kind)


@router.get("/status", tags=["operation"])
async def status(request: Request) -> dict[str, Any]:
    """The data of the status page: counters and pool maps. Never waits for the engine's step."""
    context = context_of(request)
    ready = context.ready and context.engine.running
    return {
        "model": context.model_name,
        "max_model_len": context.engine.engine.max_model_len,
        "ready": ready,
        "time": time.time(),
        "uptime": time.time() - context.started,
        "api_key_needed": bool(context.settings.api_key),
        "chat": context.codec.tokenizer is not None and context.codec.tokenizer.has_chat_template,
        "stats": context.engine.latest_stats,
        "hardware": hardware(context.engine.engines),
        "latency": context.metrics.latency(),
        "waiting": waiting(context.engine.engines),
        "maps": _maps(context.engine.engines) if ready else {},
    }


def _card(context: Context, name: str) -> ModelCard:
    root, parent = context.adapters.get(name, context.model_name), context.model_name
    return ModelCard(
        id=name, object="model", created=int(context.started), owned_by="mamba-jax", root=root,
        parent=parent if name in context.adapters else None, max_model_len=context.engine.engine.max_model_len,
    )  # fmt: skip


def _anthropic_card(context: Context, name: str) -> dict[str, str]:
    created = datetime.fromtimestamp(context.started, UTC).isoformat(timespec="seconds")
    return {"type": "model", "id": name, "display_name": name, "created_at": created}


def waiting(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Returns waiting requests by client and reason, the most requests first; approximate, as the engines go on.

    Clients are numbered in queue order, because anyone may read this page.
    """
    now, clients = time.monotonic(), dict[str | None, int]()
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for engine in engines:
        scheduler, held = engine.loop.scheduler, engine.control.why_held
        for request in scheduler.queues.waiting[:_QUEUE]:
            client = clients.setdefault(request.client, len(clients) + 1)
            reason = held or str(scheduler.wait_reason(request))
            new = {"client": client, "reason": reason, "requests": 0, "prompt_tokens": 0, "seconds": 0.0}
            row = rows.setdefault((client, reason), new)
            row["requests"] += 1
            row["prompt_tokens"] += request.prompt_len
            metrics = request.user.parent.output.metrics
            row["seconds"] = max(row["seconds"], now - metrics.arrival_time if metrics is not None else 0.0)
    return sorted(rows.values(), key=lambda row: -row["requests"])[:_ROWS]


def hardware(engines: Sequence[Engine]) -> dict[str, Any]:
    """Returns the devices of all engines, and the memory that JAX has allocated on this process's devices."""
    meshes = [getattr(engine.loop.programs, "mesh", None) for engine in engines]
    devices = own_devices(meshes) or jax.local_devices()[:1]
    memory = [device.memory_stats() or {} for device in devices]
    return {
        "devices": describe(meshes),
        "platform": devices[0].platform,
        "jax": jax.__version__,
        "memory_used_bytes": sum(each.get("bytes_in_use", 0) for each in memory) or None,
        "memory_bytes": sum(each.get("bytes_limit", 0) for each in memory) or None,
    }


def _maps(engines: Sequence[Engine]) -> dict[str, str]:
    """Returns a letter for each slot and page from id 1, engine by engine: f, u and c for free, used and cached ones;
    approximate, as the engines go on."""
    maps: dict[str, str] = {}
    for engine in engines:
        for pool in engine.loop.scheduler.cache.pools:
            ids = range(1, pool.size, -(-(pool.size - 1) // (_CELLS // len(engines))))
            letters = ("u" if pool.refs[i] else "f" if pool.owners[i] is None else "c" for i in ids)
            maps[pool.name] = maps.get(pool.name, "") + "".join(letters)
    return maps


class Profiler:
    """Takes at most one profile of this process at a time, for at most `seconds`, because a profile stays in memory
    until it is written to `directory`; None refuses profiles."""

    def __init__(self, directory: str | None, seconds: float) -> None:
        self._directory, self._seconds = directory, seconds
        self._lock = asyncio.Lock()
        self._end: asyncio.Task[None] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._stopped = True

    async def start(self) -> str:
        """Starts a profile. Returns its folder. Refuses a second profile, and one without a folder."""
        if self._directory is None:
            raise ApiError(400, "no folder for profiles: start the server with --profile-dir", code="no_profile_dir")
        async with self._lock:
            if self._end is not None:
                raise ApiError(409, "a profile is running: end it with /stop_profile", code="profile_running")
            await asyncio.to_thread(self._begin)
            self._end = asyncio.create_task(self._end_later())
        return self._directory

    async def stop(self) -> str:
        """Ends the profile and writes it. Returns its folder. Refuses if no profile is running.

        A profile that cannot be written is kept until the process ends, and may be written later.
        """
        async with self._lock:
            if self._end is None or self._directory is None:
                raise ApiError(409, "no profile is running: start one with /start_profile", code="no_profile")
            if self._end is not asyncio.current_task():
                self._end.cancel()
            try:
                await asyncio.to_thread(self._write, self._directory)
            except Exception as error:
                why = (
                    f"the profile cannot be written to {self._directory} ({one_line(error)}); fix the folder and call "
                    "/stop_profile again"
                )
                raise ApiError(503, why, code="profile_not_written") from error
            self._end = None
        return self._directory

    def _begin(self) -> None:
        # JAX drops a profile that it cannot export, so it exports to a folder of its own.
        folder = tempfile.TemporaryDirectory(prefix="mamba-jax-profile-", ignore_cleanup_errors=True)
        jax.profiler.start_trace(folder.name)
        self._folder, self._stopped = folder, False

    def _write(self, directory: str) -> None:
        if not self._stopped:
            jax.profiler.stop_trace()
            self._stopped = True
        assert self._folder is not None
        shutil.copytree(self._folder.name, directory, dirs_exist_ok=True)
        self._folder.cleanup()

    async def _end_later(self) -> None:
        await asyncio.sleep(self._seconds)
        log.warning("ending a profile after %g s", self._seconds)
        try:
            await self.stop()
        except ApiError as error:
            log.warning("%s", error.message)


def profiling_router(directory: str | None, seconds: float) -> APIRouter:
    """Returns a router with the two paths and one `Profiler`."""
    router = APIRouter(tags=["operation"], dependencies=[Depends(admin_only)])
    profiler = Profiler(directory, seconds)

    @router.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Start a profile of the whole process."""
        return {"status": "profiling", "directory": await profiler.start()}

    @router.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """End the profile, and write it for XProf (or TensorBoard)."""
        return {"status": "written", "directory": await profiler.stop()}

    return router
