"""Limits of one connection: time and bytes until a request's headers are complete, and time of unread output.

Without these limits, or a proxy that enforces them, a client could occupy file descriptors and memory indefinitely.

The server answers connections beyond the limit with 503, so that a router or load balancer sends their requests
elsewhere; a connection closed without an answer would look like a failed server. `reserve` limits how many connections
are being refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.api.http.errors import TOO_MANY_CONNECTIONS, ApiError
from serving.api.http.settings import ConnectionBounds

_REFUSAL_TIMEOUT = 5.0
"""Seconds to read the headers of a refused request and to send the refusal."""

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Raises this process's limit of open files and connections to the system's maximum."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("could not raise the limit of %d open files: %s", soft, error)


def reserve(max_connections: int) -> int:
    """Returns the maximum number of connections beyond the limit that receive a refusal at once. Further ones are
    closed."""
    return max(16, max_connections // 8)


def bounded(bounds: ConnectionBounds) -> type[BoundedConnection]:
    """Returns the protocol class for connections with these bounds."""
    return type("Connection", (BoundedConnection,), {"bounds": bounds})


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with timeouts and limits. The server aborts a connection that exceeds one."""

    bounds: ConnectionBounds
    beyond_limit = False
    """The server had too many connections when it accepted this one."""
    _head: asyncio.TimerHandle | None = None
    """Timeout of a request's headers; runs while they are incomplete."""
    _head_bytes = 0
    """Bytes received since the headers started, while they are incomplete."""
    _parsed_bytes = 0
    """Parsed bytes of the request's line and headers; excludes the body if both arrive together."""
    _unread: asyncio.TimerHandle | None = None
    """Timeout of unread output; runs while the client does not read."""
    _refusal: asyncio.TimerHandle | None = None
    """Timeout of a connection beyond the limit; the server refuses its request."""
    _refused = False
    """The refusal has been sent. Further input is discarded."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.bounds.max_connections
        if len(self.connections) > most + reserve(most):
            self._abort("too many connections")
            return
        if self.beyond_limit or len(self.connections) > most:
            self._refusal = self.loop.call_later(_REFUSAL_TIMEOUT, self._abort, "the client did not read the refusal")
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head is None and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        super().data_received(data)
        if self._head is not None:
            self._head_bytes += len(data)
            if self._head_bytes > self.bounds.max_header_bytes:
                self._abort("the request's headers are too long")

    def on_message_begin(self) -> None:
        self._parsed_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._parsed_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._parsed_bytes += len(name) + len(value) + len(b": \r\n")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._stop_head_clock()
        if self._parsed_bytes > self.bounds.max_header_bytes:
            self._abort("the request's headers are too long")
        elif self._refusal is not None:
            self._send_refusal()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ended:  # a request that was aborted or refused after its headers has no cycle
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ended:
            super().on_message_complete()

    @property
    def _ended(self) -> bool:
        return self._refused or self.transport.is_closing()

    def _send_refusal(self) -> None:
        if self._refused:  # a second request in the same data
            return
        self._refused = True
        body = ApiError(503, "the server has too many connections", code=TOO_MANY_CONNECTIONS).body(
            self.url.decode(errors="replace")
        )
        head = (
            b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        self.transport.write(head + body)
        if self.transport.can_write_eof():  # with unread input, closing could reset the connection too early
            self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.bounds.read_timeout, self._abort, "the client does not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_clock()
        if self._refusal is not None:
            self._refusal.cancel()
        self.resume_writing()
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._head_bytes = 0
        self._head = self.loop.call_later(self.bounds.header_timeout, self._abort, "incomplete request headers")

    def _stop_head_clock(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _abort(self, why: str) -> None:
        log.debug("aborted connection: %s", why)
        self._stop_head_clock()
        self.transport.abort()
