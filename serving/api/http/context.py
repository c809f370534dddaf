"""What every handler needs: the engine, the settings and what goes with them."""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from serving.api.http.errors import ApiError
from serving.api.http.settings import ServerSettings
from serving.api.http.text import TextCodec
from serving.api.http.tool_calls import ToolCallForm, form_of
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.async_engine import AsyncEngine, EngineStopped

_PATIENCE = 0.5
"""Seconds that a look at the engine waits for the end of a step; a step that compiles takes longer."""


@dataclass
class Context:
    """One server's parts. `context_of(request)` gives it to handlers, and to routers of other rooms."""

    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    traces: Traces
    codec: TextCodec
    started: float = field(default_factory=time.time)
    ready: bool = False
    """Every program has been compiled: requests are taken."""
    _snapshot: dict[str, Any] = field(default_factory=dict)

    @property
    def model_name(self) -> str:
        """What the model is called in answers."""
        return self.settings.served_model_name[0]

    @functools.cached_property
    def tool_calls(self) -> ToolCallForm | None:
        """How the model writes calls of tools."""
        named = self.settings.tool_call_parser
        if named == "none":
            return None
        return form_of(self.codec.tokenizer) if named == "auto" else named

    def check(self, model: str | None) -> None:
        """Refuse a request that names another model, or comes too early.

        Raises:
            ApiError: 404 or 503.
        """
        if model is not None and model not in self.settings.served_model_name:
            known = ", ".join(self.settings.served_model_name)
            raise ApiError(
                404, f"the model {model!r} does not exist here (there is: {known})", param="model",
                code="model_not_found",
            )  # fmt: skip
        if not self.engine.running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        if not self.ready:
            raise ApiError(503, "the model is still being made ready", code="not_ready", headers={"Retry-After": "2"})

    async def stats(self) -> dict[str, Any]:
        """The engine's counters: of now, or where it is busy for longer (it compiles, or has stopped) the last ones."""
        if self.engine.running:
            try:
                async with asyncio.timeout(_PATIENCE):
                    self._snapshot = await self.engine.call(lambda engine: engine.stats())
            except (TimeoutError, EngineStopped):
                pass
        return self._snapshot


def context_of(request: Request) -> Context:
    """The context of the app that a request has come to."""
    context: Context = request.app.state.context
    return context
