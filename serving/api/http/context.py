"""What every handler needs: the engine, the settings and what goes with them."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

from fastapi import Request

from serving.api.http.call_formats import form_of
from serving.api.http.errors import ApiError
from serving.api.http.reasoning import THINK, ReasoningMarks, marks_of
from serving.api.http.settings import ServerSettings, ToolCallForm
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.replicas import Served


@dataclass
class Context:
    """One server's parts. `context_of(request)` gives it to handlers, and to routers of other rooms."""

    engine: Served
    settings: ServerSettings
    metrics: Metrics
    traces: Traces
    codec: TextCodec
    started: float = field(default_factory=time.time)
    ready: bool = False
    """The programs that no step can do without have been compiled: requests are taken."""

    @property
    def model_name(self) -> str:
        """What the model is called in answers."""
        return self.settings.served_model_name[0]

    @functools.cached_property
    def tool_calls(self) -> ToolCallForm | None:
        """Tool-call format."""
        named = self.settings.tool_call_parser
        if named == "none":
            return None
        return form_of(self.codec.tokenizer) if named == "auto" else named

    @functools.cached_property
    def reasoning(self) -> ReasoningMarks | None:
        """Marks around reasoning."""
        named = self.settings.reasoning_parser
        if named == "none":
            return None
        return marks_of(self.codec.tokenizer) if named == "auto" else THINK

    def close(self) -> None:
        """Stop the threads."""
        self.codec.close()

    def check_alive(self) -> None:
        """Whether the engine can be expected to answer at all.

        Raises:
            ApiError: 503: it has stopped, or is in a step that does not end. (Before it is ready, it may compile.)
        """
        if not self.engine.running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        seconds = self.engine.step_seconds
        if self.ready and seconds > self.settings.step_timeout:
            raise ApiError(503, f"the engine has been in one step for {seconds:.0f} s", code="engine_stuck")

    def check(self, model: str | None) -> None:
        """Refuse a request that names another model, or comes too early.

        Raises:
            ApiError: 404 or 503.
        """
        if model is not None and model not in self.settings.served_model_name:
            known = ", ".join(self.settings.served_model_name)
            raise ApiError(
                404, f"the model {model!r} does not exist (available: {known})", param="model",
                code="model_not_found",
            )  # fmt: skip
        self.check_alive()
        if not self.ready:
            raise ApiError(503, "the model is still warming up", code="not_ready", headers={"Retry-After": "2"})


def context_of(request: Request) -> Context:
    """The context of the app that a request has come to."""
    context: Context = request.app.state.context
    return context
