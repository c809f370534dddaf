"""What the status page shows: the engine's counters, and a map of both pools."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from serving.api.http.context import Context
from serving.core import Pool, Use
from serving.engine.engine import Engine

_CELLS = 1024
"""Cells of a map at most; of larger pools every so many-th id is shown."""

_LETTERS = {Use.FREE: "f", Use.USED: "u", Use.CACHED: "c"}


def status_of(context: Context) -> dict[str, Any]:
    """Counters and pool maps, as JSON. Waits for nothing: the engine may be in the middle of a step."""
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
        "maps": maps,
    }


def _maps(engines: Sequence[Engine]) -> dict[str, str]:
    """A letter for each slot and page, one engine's after the other's.

    The engines may be changing them meanwhile: a picture, not an account.
    """
    maps: dict[str, str] = {}
    for engine in engines:
        for pool in engine.loop.scheduler.pools:
            maps[pool.name] = maps.get(pool.name, "") + pool_map(pool, _CELLS // len(engines))
    return maps


def pool_map(pool: Pool, cells: int = _CELLS) -> str:
    """f, u and c for the free, used and cached ids of a pool, from id 1 on; so many letters at most."""
    step = -(-(pool.size - 1) // cells)
    return "".join(_LETTERS[pool.use_of(i)] for i in range(1, pool.size, step))
