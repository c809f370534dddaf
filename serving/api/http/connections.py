"""What one connection can hold: time until its request's head is complete, bytes of that head, output left unread.

A proxy in front of the server usually bounds the same. Without one, or behind one that does not, each of these would
keep a file descriptor, and some of them memory, for as long as a client likes.

Connections beyond the limit are answered with 503 and closed, so that a router or a load balancer sends their requests
elsewhere: a closed connection looks like a server that has failed. A reserve bounds how many are being refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.api.http.errors import TOO_MANY_CONNECTIONS, ApiError
from serving.api.http.settings import ConnectionBounds

_REFUSAL_TIMEOUT = 5.0
"""Seconds for reading the head of a request that is refused, and for the client to take the answer."""

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Raise the number of files and connections that this process may have open as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("at most %d open files: the limit cannot be raised (%s)", soft, error)


def reserve(max_connections: int) -> int:
    """Connections beyond the limit that may be open at once to be refused; further ones are closed."""
    return max(16, max_connections // 8)


def bounded(bounds: ConnectionBounds) -> type[BoundedConnection]:
    """The protocol class of a server whose connections have these bounds."""

    class Connection(BoundedConnection):
        pass

    Connection.bounds = bounds
    return Connection


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with clocks. What exceeds a bound is cut off: such a client is not waiting for an answer."""

    bounds: ConnectionBounds
    beyond_limit = False
    """There were too many connections when this one was accepted."""
    _head: asyncio.TimerHandle | None = None
    """Runs while the head of a request is incomplete."""
    _head_bytes = 0
    """Received since the head began, while it is incomplete."""
    _parsed_bytes = 0
    """Of the request's line and headers, as far as they have been parsed: exact where a piece also holds a body."""
    _unread: asyncio.TimerHandle | None = None
    """Runs while the client does not read."""
    _refusal: asyncio.TimerHandle | None = None
    """Runs while the connection is beyond the limit: its request is refused."""
    _refused = False
    """The refusal has been sent. What the client still sends is not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.bounds.max_connections
        if len(self.connections) > most + reserve(most):
            self._cut("too many connections")
            return
        if self.beyond_limit or len(self.connections) > most:
            self._refusal = self.loop.call_later(_REFUSAL_TIMEOUT, self._cut, "the refusal has not been read")
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
                self._cut("the head of a request is too long")

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
            self._cut("the head of a request is too long")
        elif self._refusal is not None:
            self._send_refusal()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._ended:  # cut off or refused at the end of its head, a request has no cycle
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._ended:
            super().on_message_complete()

    @property
    def _ended(self) -> bool:
        return self._refused or self.transport.is_closing()

    def _send_refusal(self) -> None:
        if self._refused:  # a second request in the same piece
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
        if self.transport.can_write_eof():  # closed with unread data, it could be reset before the client has read
            self.transport.write_eof()
        else:
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.bounds.read_timeout, self._cut, "the client does not read")

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
        self._head = self.loop.call_later(self.bounds.header_timeout, self._cut, "the head of a request is incomplete")

    def _stop_head_clock(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _cut(self, why: str) -> None:
        log.debug("connection cut off: %s", why)
        self._stop_head_clock()
        self.transport.abort()
