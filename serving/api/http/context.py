"""What handlers share: engine, settings, metrics, traces, tokenizer and stored responses; and what a request needs."""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request
from starlette.responses import Response

from serving.api.http.errors import ApiError
from serving.api.http.parsing.formats import THINK, ReasoningMarks, form_of, reasoning_marks
from serving.api.http.settings import ServerSettings, ToolCallForm
from serving.api.http.text import TextCodec
from serving.api.metrics import Metrics
from serving.api.traces import Traces
from serving.engine.async_engine import AsyncEngine
from serving.engine.fair_lru import FairLru
from serving.engine.requests.adapters import LoRARequest
from serving.engine.requests.sampling_params import MAX_LOGPROBS

CHANGING_LINES = ("x-anthropic-billing-header:",)
"""Beginnings of lines of system text that clients change in each session, which would prevent the use of cached
prefixes."""


@dataclass(frozen=True)
class StoredResponse:
    """One stored response."""

    messages: Sequence[dict[str, Any]]
    """The whole conversation, including this response, without instructions."""
    response: bytes
    """The response as JSON."""
    owner: bytes
    """Digest of the key that created it; requests with another key cannot read it."""
    items: Sequence[dict[str, Any]] = ()
    """The items of its input, without those of earlier responses."""


class ResponseStore:
    """Stores responses of `/v1/responses` in memory, so that conversations can continue from them: at most `most`
    responses of at most `most_bytes` together. Keys share these limits. A response larger than `most_bytes` is not
    stored. Any thread may use the store."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.stored = FairLru[StoredResponse](most, most_bytes)
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the limit."""
        # Approximate: conversations that share their beginnings each count in full.
        size = len(stored.response) + len(json.dumps([stored.messages, stored.items]))
        with self._lock:
            self.stored.put(response_id, stored, stored.owner, size)

    def find(self, response_id: str, key: str | None, param: str = "response_id") -> StoredResponse:
        """Returns the response with this id, if it was created with this key and is still stored.

        Raises:
            ApiError: 404 otherwise; `param` is the field with the id.
        """
        with self._lock:
            stored = self.stored.get(response_id)
        if stored is None or stored.owner != owner_of(key):
            raise ApiError(
                404, f"there is no stored response {response_id[:64]!r}: responses are stored in memory, within "
                "limits, until the server ends", param=param, code="response_not_found",
            )  # fmt: skip
        return stored

    def delete(self, response_id: str, key: str | None) -> None:
        """Deletes the response that `find` returns."""
        self.find(response_id, key)
        with self._lock:
            self.stored.pop(response_id)


def owner_of(key: str | None) -> bytes:
    """Returns the digest of a key."""
    return hashlib.sha256((key or "").encode()).digest()


@dataclass(frozen=True)
class ResponseContext:
    """What determines the prompts and the response of one request, to a server or in a batch file."""

    codec: TextCodec
    model: str
    """Name of the model in the response."""
    settings: ServerSettings = field(default_factory=ServerSettings.create)
    """Limits, and defaults for fields that requests omit."""
    vocab_size: int | None = None
    """Size of the vocabulary of the model; None does not check token ids."""
    tool_calls: ToolCallForm | None = None
    """Tool-call format; None leaves calls in the text."""
    reasoning: ReasoningMarks | None = None
    """Marks around reasoning; None leaves it in the text."""
    store: ResponseStore = field(default_factory=lambda: ResponseStore(0, 0))
    key: str | None = None
    """The key of the client: it may continue the responses in `store` that this key created."""
    max_logprobs: int = MAX_LOGPROBS
    """Maximum number of alternatives in log-probabilities; the engine refuses more than it reports."""
    expert_bytes: int = 0
    """Bytes of routed experts that the engine records of each token."""
    marks: bool = True
    """Prompts get marks of the prefix cache, for which conversations are rendered several times."""

    @property
    def omitted(self) -> tuple[str, ...]:
        """The beginnings of lines of system text that prompts omit."""
        return *CHANGING_LINES, *self.settings.omit_system_lines

    def conversation(self, response_id: str) -> Sequence[dict[str, Any]]:
        """Returns the messages of the conversation that ends with a stored response of this client."""
        return self.store.find(response_id, self.key, "previous_response_id").messages


Transfer = Callable[[str, int, Any, Request], Coroutine[Any, Any, Response | None]]
"""What a worker does with `kv_transfer_params` before it generates. Gets the API, the number of prompts that
a state can replace, this field and the request; returns the whole response, or None to generate one."""


@dataclass
class Context:
    """One server's shared objects. Handlers get it from `context_of(request)`."""

    engine: AsyncEngine
    settings: ServerSettings
    metrics: Metrics
    traces: Traces
    codec: TextCodec
    adapters: dict[str, str] = field(default_factory=dict)
    """Directories of the LoRA adapters that requests can name as their model, by name."""
    store: ResponseStore = field(default_factory=lambda: ResponseStore(0, 0))
    started: float = field(default_factory=time.time)
    transfer: Transfer | None = None
    """Set by a worker in a split."""
    ready: bool = False
    """The required programs are compiled, and the server accepts requests."""

    @property
    def model_name(self) -> str:
        """The model's name in responses."""
        return self.settings.served_model_name[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Every name that requests can use: the model's, then those of its adapters."""
        return *self.settings.served_model_name, *self.adapters

    def adapter_of(self, model: str | None) -> LoRARequest | None:
        """Returns the adapter with this name; None for the model itself."""
        path = self.adapters.get(model or "")
        return None if model is None or path is None else LoRARequest(model, 0, path)

    def of_request(self, model: str | None, key: str | None) -> ResponseContext:
        """Returns the context of a request for `model` by the client with this key."""
        name = model if model is not None and model in self.adapters else self.model_name
        engine = self.engine.engine
        return ResponseContext(
            self.codec, name, self.settings, engine.vocab_size, self.tool_calls, self.reasoning, self.store, key,
            engine.max_logprobs, engine.expert_bytes, engine.loop.scheduler.config.caching,
        )  # fmt: skip

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
        return reasoning_marks(self.codec.tokenizer) if named == "auto" else THINK

    def check_alive(self) -> None:
        """Checks that the engine runs and makes progress.

        Raises:
            ApiError: 503: the engine stopped, or its step exceeds `step_timeout` (not checked while it compiles).
        """
        if not self.engine.running:
            raise ApiError(503, "the engine has stopped", code="engine_stopped")
        seconds = self.engine.step_seconds
        if self.ready and seconds > self.settings.step_timeout:
            raise ApiError(503, f"the engine has been in one step for {seconds:.0f} s", code="engine_stuck")

    def check(self, model: str | None) -> None:
        """Checks that the server has this model, and is ready.

        Raises:
            ApiError: 404 or 503.
        """
        if model is not None and model not in self.model_names:
            known = ", ".join(self.model_names)
            raise ApiError(
                404, f"the model {model!r} does not exist (available: {known})", param="model",
                code="model_not_found",
            )  # fmt: skip
        self.check_alive()
        if not self.ready:
            raise ApiError(503, "the model is still warming up", code="not_ready", headers={"Retry-After": "2"})


def context_of(request: Request) -> Context:
    """Returns the context of the application that received the request."""
    context: Context = request.app.state.context
    return context
