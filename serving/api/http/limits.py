"""What happens to every request before a handler sees it: id, key, kind and size of the body; and the log line after.

A plain ASGI middleware: it hands on `receive` and `send`, so handlers still notice when a client leaves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.api.http.errors import ApiError, as_api_error
from serving.api.http.generation import Tally
from serving.api.http.json_values import MAX_DEPTH, depth, weight
from serving.api.http.keys import check_key, set_client
from serving.api.http.settings import RequestBounds
from serving.api.http.streaming import ClientGone
from serving.api.metrics import Metrics

log = logging.getLogger("serving.requests")

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/load", "/version", "/metrics", "/status"})
"""Need no API key: probes, and numbers without any content."""
_QUIET = frozenset({"/health", "/ping", "/ready", "/load", "/metrics", "/status"})
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Limits:
    """The middleware.

    Args:
        app: what comes next.
        bounds: keys, sizes and times.
        metrics: counts requests by path and status.
    """

    def __init__(self, app: ASGIApp, bounds: RequestBounds, metrics: Metrics) -> None:
        self._app, self._bounds, self._metrics = app, bounds, metrics
        self._keys = (*bounds.api_key, *bounds.admin_key) if bounds.api_key else ()
        self._buffered = 0
        """Bytes of the bodies of all requests that have not been answered."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, begin = Headers(scope=scope), time.monotonic()
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        held = 0  # bytes of the body
        status, started = 499, False  # 499: the client left before there was an answer

        async def sending(message: Message) -> None:
            nonlocal status, started
            if message["type"] == "http.response.start":
                status, started = message["status"], True
                added = MutableHeaders(scope=message)
                added["x-request-id"] = request_id
                added["x-content-type-options"] = "nosniff"
            await send(message)

        with self._metrics.in_flight():
            try:
                self._check(scope, headers)
                if scope["method"] in ("POST", "PUT", "PATCH"):
                    receive, held = await self._read(headers, receive)
                await self._app(scope, receive, sending)
            except ClientGone:
                log.debug("the client has left")
            except Exception as error:
                if started:
                    raise
                await as_api_error(error).response(_path(scope))(scope, receive, sending)
            finally:
                self._buffered -= held
        # Only paths that exist: others are a client's invention, and each label value costs memory for ever.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.answered(route, status)
        self._log(scope, request_id, status, time.monotonic() - begin)

    def _check(self, scope: Scope, headers: Headers) -> None:
        if self._keys and _path(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
            check_key(headers, self._keys)
            set_client(headers)
        if scope["method"] == "POST" and not _empty(headers):
            kind = headers.get("content-type", "").partition(";")[0].strip().lower()
            if kind != "application/json":
                raise ApiError(415, f"the body must be application/json, not {kind or 'of no stated type'}")

    async def _read(self, headers: Headers, receive: Receive) -> tuple[Receive, int]:
        """Takes the whole body in, within its bounds. Returns what gives it to the handler, and its size, which stays
        counted as buffered."""
        most = self._bounds.max_body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and (len(length) > 18 or int(length) > most):
            raise _too_large(most)
        body = bytearray()
        try:
            async with asyncio.timeout(self._bounds.body_timeout):
                await self._fill(body, receive)
            self._look_at(body)
        except BaseException as error:
            self._buffered -= len(body)
            if isinstance(error, TimeoutError):
                raise ApiError(
                    408, f"the body did not arrive within {self._bounds.body_timeout:g} seconds",
                    headers={"Connection": "close"},
                ) from None  # fmt: skip
            raise
        whole: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        return replay, len(body)

    async def _fill(self, body: bytearray, receive: Receive) -> None:
        more = True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) + len(piece) > self._bounds.max_body_bytes:
                raise _too_large(self._bounds.max_body_bytes)
            if self._buffered + len(piece) > self._bounds.max_buffered_bytes:
                raise ApiError(
                    503, "the server is holding as many request bodies as it can; try again later", code="busy",
                    headers={"Retry-After": "1", "Connection": "close"},
                )  # fmt: skip
            body += piece
            self._buffered += len(piece)

    def _look_at(self, body: bytearray) -> None:
        most = self._bounds.max_body_values
        if weight(body, most) > most:
            raise ApiError(
                413,
                f"the body holds too many JSON values: at most {most:,} are allowed, where a string, array or object "
                "counts as 10",
                code="too_many_values",
            )
        if depth(body) > MAX_DEPTH:
            raise ApiError(400, f"the body is nested more than {MAX_DEPTH} levels deep", code="too_deeply_nested")
        _refuse_half_characters(body)

    def _log(self, scope: Scope, request_id: str, status: int, seconds: float) -> None:
        if not self._bounds.log_requests or _path(scope) in _QUIET:
            return
        fields = {
            "request_id": request_id,
            "method": scope["method"],
            "path": scope["path"][:200],
            "status": status,
            "seconds": round(seconds, 4),
        }
        tally: Tally | None = scope["state"].get("tally")
        if tally is not None:
            usage = tally.usage()
            fields["prompt_tokens"] = usage.prompt_tokens
            fields["completion_tokens"] = usage.completion_tokens
            fields["cached_tokens"] = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details else 0
        log.info("request", extra={"fields": fields})


def _path(scope: Scope) -> str:
    """The path as this server's own, without what a proxy has in front of it (`--root-path`)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _empty(headers: Headers) -> bool:
    """Whether there is no body, as in `curl -X POST` of a path that takes none."""
    return headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers


def _refuse_half_characters(body: bytes | bytearray) -> None:
    """JSON can escape half a surrogate pair, which is no character: such a text could not even be sent back.

    Raises:
        ApiError: the body has one.
    """
    if not _SURROGATE.search(body):
        return
    try:
        json.dumps(json.loads(body), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ApiError(400, "the body has half a surrogate pair, which is not a character") from None
    except (ValueError, RecursionError):
        return  # not JSON: the handler says so


def _too_large(most: int) -> ApiError:
    return ApiError(
        413, f"the body is larger than {most:,} bytes", code="body_too_large", headers={"Connection": "close"}
    )
