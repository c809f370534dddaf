"""Data of the status page: the engine's counters, and maps of its pools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax

from serving.api.http.context import Context
from serving.core import Pool, PoolUse
from serving.engine.assembly.devices import describe, own_devices
from serving.engine.engine import Engine

_CELLS = 1024
"""Maximum number of cells of a map. Maps of larger pools show every n-th id."""

_QUEUE, _ROWS = 1024, 16
"""Maximum number of waiting requests examined per engine, and of rows in the table of waiting requests."""

_LETTERS = {PoolUse.FREE: "f", PoolUse.USED: "u", PoolUse.CACHED: "c"}


def status_of(context: Context) -> dict[str, Any]:
    """Returns counters and pool maps, as JSON. Never waits for the engine's step."""
    maps: dict[str, str] = {}
    if context.engine.running and context.ready:
        maps = _maps(context.engine.engines)
    return {
        "model": context.model_name,
        "max_model_len": context.engine.engine.max_model_len,
        "ready": context.ready and context.engine.running,
        "time": time.time(),
        "uptime": time.time() - context.started,
        "api_key_needed": bool(context.settings.api_key),
        "chat": context.codec.tokenizer is not None and context.codec.tokenizer.has_chat_template,
        "stats": context.engine.latest_stats,
        "hardware": hardware(context.engine.engines),
        "latency": context.metrics.latency(),
        "waiting": waiting(context.engine.engines),
        "maps": maps,
    }


def waiting(engines: Sequence[Engine]) -> list[dict[str, Any]]:
    """Returns waiting requests by client and reason, the most requests first.

    Clients are numbered in queue order, because anyone may read this page. The engines may change the queues
    meanwhile, so the result is approximate.
    """
    now, clients = time.monotonic(), dict[str | None, int]()
    rows: dict[tuple[int, str], dict[str, Any]] = {}
    for engine in engines:
        scheduler, held = engine.loop.scheduler, engine.control.why_held
        for request in scheduler.waiting[:_QUEUE]:
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
    """Returns a letter for each slot and page, engine by engine. The result is approximate, because the engines may
    change the pools meanwhile."""
    maps: dict[str, str] = {}
    for engine in engines:
        for pool in engine.loop.scheduler.pools:
            maps[pool.name] = maps.get(pool.name, "") + pool_map(pool, _CELLS // len(engines))
    return maps


def pool_map(pool: Pool, cells: int = _CELLS) -> str:
    """Returns the letters f, u and c for free, used and cached ids of a pool, from id 1; at most `cells` letters."""
    step = -(-(pool.size - 1) // cells)
    return "".join(_LETTERS[pool.use_of(i)] for i in range(1, pool.size, step))
