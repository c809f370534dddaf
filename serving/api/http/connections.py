"""What one connection can hold: time until its request's head is complete, bytes of that head, output left unread.

A proxy in front of the server usually bounds the same. Without one, or behind one that does not, each of these would
keep a file descriptor, and some of them memory, for as long as a client likes.
"""

from __future__ import annotations

import asyncio
import logging
import resource

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.api.http.settings import ConnectionBounds

log = logging.getLogger(__name__)


def raise_descriptor_limit() -> None:
    """Raise the number of files and connections that this process may have open as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError) as error:
            log.warning("at most %d open files: the limit cannot be raised (%s)", soft, error)


def bounded(bounds: ConnectionBounds) -> type[HttpToolsProtocol]:
    """The protocol class of a server whose connections have these bounds."""

    class Connection(_BoundedConnection):
        pass

    Connection.bounds = bounds
    return Connection


class _BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with clocks. What exceeds a bound is cut off: such a client is not waiting for an answer."""

    bounds: ConnectionBounds
    _head: asyncio.TimerHandle | None = None
    """Runs while the head of a request is incomplete."""
    _head_bytes = 0
    """Received since the head began, while it is incomplete."""
    _parsed_bytes = 0
    """Of the request's line and headers, as far as they have been parsed: exact where a piece also holds a body."""
    _unread: asyncio.TimerHandle | None = None
    """Runs while the client does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.bounds.max_connections:
            self._cut("too many connections")
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
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
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():  # cut off at the end of its head, a request has no cycle
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.transport.is_closing():
            super().on_message_complete()

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
