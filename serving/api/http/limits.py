"""Checks of every request before its handler runs (id, key, content type, size of the body), its turn among those of
other clients, and its log line.

A plain ASGI middleware: it passes `receive` and `send` on, so that handlers still notice when a client disconnects.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import TypeVar

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.http.connection.keys import check_key, client_id, set_client
from serving.api.http.connection.streaming import ClientGone
from serving.api.http.errors import ANTHROPICS, ApiError, as_api_error, path_of
from serving.api.http.generation import Job
from serving.api.http.json_values import MAX_DEPTH, depth, has_half_characters, weight
from serving.api.http.settings import RequestBounds
from serving.api.metrics import Metrics

T = TypeVar("T")

_LONGEST = 0.02
"""Maximum delay of a client's next request in seconds, however much time its earlier ones took."""
_WEIGHT = 2
"""Factor of the time on the event loop: the engine's thread spends about as much again on a short request."""


@dataclass
class _Client:
    requests: int = 0
    """Requests that are under way, or wait."""
    next_at: float = 0.0
    """When the next one may begin."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Turns:
    """Clients (API keys) share the event loop's time. The event loop and the engine's thread share one interpreter.

    The scheduler divides steps, but reading and answering a request takes as long as a step of a small model. While
    several clients have requests, the next request of one begins only when twice the time that its earlier ones took
    has passed for each client. It begins at most `_LONGEST` late. The clients of a server are those with valid keys, so
    there is a bounded number of them.
    """

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._begun = 0
        """Requests under way of all clients."""
        self._active = 0
        """Clients with requests."""

    async def run(self, name: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of a client's request, which begins in its turn; without keys (None) at once."""
        if name is None:
            return await work()
        client, clock = self._clients.setdefault(name, _Client()), asyncio.get_running_loop().time
        client.requests += 1
        self._active += client.requests == 1
        try:
            async with client.turn:
                if self._active > 1:
                    await asyncio.sleep(max(client.next_at - clock(), 0))
            self._begun += 1
            begin, spent = clock(), thread_time()
            try:
                return await work()
            finally:
                part = (thread_time() - spent) / self._begun  # of the loop's time since then; others ran as well
                self._begun -= 1
                next_at = max(client.next_at, begin) + _WEIGHT * part * self._active
                client.next_at = min(next_at, clock() + _LONGEST)
        finally:
            client.requests -= 1
            self._active -= client.requests == 0


log = logging.getLogger("serving.requests")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/load", "/version", "/metrics", "/status"})
"""Paths without an API key: probes, and counters that contain no text."""
_UNTIL_THE_END = OPEN_PATHS - {"/ready"} | {"/split/offer", "/split/renew", "/split/release"}
"""Paths that answer while the server shuts down: probes, and states that other workers' requests still wait for."""
_QUIET = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/status"})
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CLOSE = {"Connection": "close"}
_RETRY = {"Retry-After": "1", **_CLOSE}


class Limits:
    """The ASGI middleware of these checks, before `app`; `metrics` counts requests by path and status."""

    def __init__(self, app: ASGIApp, bounds: RequestBounds, metrics: Metrics) -> None:
        self._app, self._bounds, self._metrics = app, bounds, metrics
        self._keys = (*bounds.api_key, *bounds.admin_key) if bounds.api_key else ()
        self._buffered = Counter[str | None]()
        """Bytes of the bodies of all unanswered requests, and of the log-probabilities of their prompts, by client."""
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server leaves out the body of the answer
            scope = {**scope, "method": "GET"}
        headers, begin = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        held = 0  # bytes of the body and of what its response needs

        def reserve(size: int) -> None:
            nonlocal held
            self._reserve(size)
            held += size

        scope["state"]["reserve"] = reserve
        status, started = 499, False  # 499: the client disconnected before the response started

        async def sending(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                if path_of(scope).startswith(ANTHROPICS):
                    added["request-id"] = request_id
                added["x-content-type-options"] = "nosniff"
            await send(message)

        with self._metrics.in_flight.track_inprogress():
            try:
                self._check(scope, headers)
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    receive = await self._read(headers, receive, reserve)
                # Streams of events, which last, are GET; and a lease must be renewed in time.
                turns = scope["method"] == "POST" and path_of(scope) not in _UNTIL_THE_END
                name = client_id() if turns else None
                await self._turns.run(name, lambda: self._app(scope, receive, sending))
            except ClientGone:
                log.debug("the client disconnected")
            except Exception as error:
                if started:
                    raise
                await as_api_error(error).response(path_of(scope))(scope, receive, sending)
            finally:
                self._buffered[client_id()] -= held
        # Count only existing paths by name: each label value occupies memory until the process ends.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.answers.labels(route, str(status)).inc()
        self._log(scope, request_id, status, time.monotonic() - begin)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if len(headers.getlist("host")) > 1:
            raise ApiError(400, "the request has more than one Host header", headers=_CLOSE)
        state = getattr(scope.get("app"), "state", None)
        ending: Callable[[], bool] = getattr(state, "ending", bool)  # set by `Server`
        if path_of(scope) not in _UNTIL_THE_END and ending():
            raise ApiError(503, "the server is shutting down", code="shutting_down", headers=_RETRY)
        if self._keys and path_of(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            check_key(headers, self._keys)
            set_client(headers)
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            raise ApiError(415, f"Content-Encoding {coding[:20]} is not supported: send the body as it is")
        empty = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers  # `curl -X POST`
        if scope["method"] == "POST" and not empty:
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, f"the body must be application/json, but Content-Type is {kind or 'missing'}")

    async def _read(self, headers: Headers, receive: Receive, reserve: Callable[[int], None]) -> Receive:
        """Reads the whole body, within its bounds, and reserves its bytes. Returns a `receive` that passes it on."""
        most, length = self._bounds.max_body_bytes, headers.get("content-length", "")
        too_large = ApiError(413, f"the body is larger than {most:,} bytes", code="body_too_large", headers=_CLOSE)
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise too_large
        body, more = bytearray(), True
        try:
            async with asyncio.timeout(self._bounds.body_timeout):
                while more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    piece, more = message.get("body", b""), message.get("more_body", False)
                    if len(body) + len(piece) > most:
                        raise too_large
                    reserve(len(piece))
                    body += piece
        except TimeoutError:
            seconds = f"{self._bounds.body_timeout:g} seconds"
            raise ApiError(408, f"the body did not arrive within {seconds}", headers=_CLOSE) from None
        self._check_json(body)
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay

    def _reserve(self, size: int) -> None:
        """Counts further bytes that unanswered requests hold; refuses with 503 if they are too many, in all or of this
        client: a key that holds more than one body takes at most as many bytes as remain free."""
        client, most = client_id(), self._bounds.max_buffered_bytes
        if size > most:
            raise ApiError(413, f"the request needs {size:,} bytes; all requests together may hold {most:,}")
        own, free = self._buffered[client], most - self._buffered.total()
        unfair = client is not None and own > self._bounds.max_body_bytes and own + size > free
        if size and (unfair or size > free):
            text = "the server's buffer for requests is full; try again later"
            raise ApiError(503, text, code="busy", headers=_RETRY)
        self._buffered[client] += size

    def _check_json(self, body: bytearray) -> None:
        most = self._bounds.max_body_values
        if weight(body, most) > most:
            raise ApiError(
                413,
                f"the body has too many JSON values: at most {most:,} are allowed, where a string, array or object "
                "counts as 10",
                code="too_many_values",
            )
        if depth(body) > MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep", code="too_deeply_nested")
        _refuse_half_characters(body)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if not self._bounds.log_requests or path_of(scope) in _QUIET:
            return
        fields = {"request_id": request_id, "method": scope["method"], "path": scope["path"][:200]}
        fields |= {"status": status, "seconds": round(seconds, 4)}
        job: Job | None = scope["state"].get("job")
        if job is not None:
            usage = job.usage()
            fields |= {"prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens}
            fields["cached_tokens"] = usage.prompt_tokens_details.cached_tokens
        log.info("request", extra={"fields": fields})


def _refuse_half_characters(body: bytes | bytearray) -> None:
    """Refuses escaped halves of surrogate pairs, which JSON allows but UTF-8 cannot encode."""
    if _SURROGATE.search(body):
        with contextlib.suppress(ValueError, RecursionError):  # not JSON: the handler reports it
            if has_half_characters(json.loads(body)):
                raise ApiError(400, "the body contains half a surrogate pair, which is not a character")
