"""What the status page shows: the engine's counters, and a map of both pools."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from serving.api.http.context import Context
from serving.core.pools import Pool
from serving.engine.engine import Engine

_CELLS = 1024
"""Cells of a map at most; of larger pools every so many-th id is shown."""

_LETTERS = np.frombuffer(b"fuc", np.uint8)
"""free, used, cached."""


async def status_of(context: Context) -> dict[str, Any]:
    """Counters and pool maps, as JSON."""
    stats = await context.stats()
    maps: dict[str, str] = {}
    if context.engine.running and context.ready:
        maps = await context.engine.call(_maps)
    return {
        "model": context.model_name,
        "max_model_len": context.engine.engine.max_model_len,
        "ready": context.ready and context.engine.running,
        "time": time.time(),
        "uptime": time.time() - context.started,
        "api_key_needed": bool(context.settings.api_key),
        "chat": context.codec.tokenizer is not None and context.codec.tokenizer.has_chat_template,
        "stats": stats,
        "maps": maps,
    }


def _maps(engine: Engine) -> dict[str, str]:
    """A letter for each slot and page. On the engine's thread."""
    host = engine.loop.scheduler.host
    pools: list[Pool] = [host.slots] if host.pages is None else [host.slots, host.pages]
    return {pool.name: pool_map(pool) for pool in pools}


def pool_map(pool: Pool) -> str:
    """f, u and c for the free, used and cached ids of a pool, from id 1 on."""
    step = -(-(pool.size - 1) // _CELLS)
    ids = range(1, pool.size, step)
    used = np.array([pool.refs[i] > 0 for i in ids], np.uint8)
    owned = np.array([pool.owners[i] is not None for i in ids], np.uint8)
    return _LETTERS[np.where(used, 1, owned * 2)].tobytes().decode()
