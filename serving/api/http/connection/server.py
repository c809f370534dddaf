"""uvicorn with bounded connections and a graceful shutdown.

A connection has limits: time and bytes until a request's headers are complete, bytes of trailers after its body, and
time of unread output. Without them, or a proxy that enforces them, a client could occupy file descriptors and memory
indefinitely.

The server answers connections beyond the limit with 503, so that a router or load balancer sends their requests
elsewhere; a connection closed without an answer would look like a failed server. `reserve` limits how many connections
are being refused at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from serving.api.http.errors import TOO_MANY_CONNECTIONS, ApiError
from serving.api.http.settings import ConnectionBounds

_REFUSAL_TIMEOUT = 5.0
"""Seconds to read the headers of a refused request and to send the refusal."""


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


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's connection with timeouts and limits. The server aborts a connection that exceeds one."""

    bounds: ConnectionBounds
    beyond_limit = False
    """The server had too many connections when it accepted this one."""
    _head_bytes = 0
    """Bytes received since headers, a part of a body or a message was complete: of unfinished headers or trailers."""
    _refused = False
    """The refusal has been sent. Further input is discarded."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timers: dict[str, asyncio.TimerHandle] = {}
        """Timeouts: `head` while a request's headers are incomplete, `unread` while the client does not read, and
        `refusal` of a connection beyond the limit, whose request the server refuses."""
        most = self.bounds.max_connections
        if len(self.connections) > most + reserve(most):
            self._abort("too many connections")
            return
        if self.beyond_limit or len(self.connections) > most:
            self._start("refusal", _REFUSAL_TIMEOUT, "the client did not read the refusal")
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if "head" not in self._timers and (self.cycle is None or self.cycle.response_complete):
            self._expect_head()
        self._head_bytes += len(data)
        super().data_received(data)  # calls the methods below
        if self._head_bytes > self.bounds.max_header_bytes:
            self._abort("the request's headers or trailers are too long")

    def on_headers_complete(self) -> None:
        if self._ended:  # a further request in the data of one that was aborted or refused
            return
        self._head_bytes = 0
        self._stop("head")
        # The body may have arrived with them.
        size = len(self.url) + sum(len(name) + len(value) + len(b": \r\n") for name, value in self.headers)
        if size > self.bounds.max_header_bytes:
            self._abort("the request's headers are too long")
        elif "refusal" in self._timers:
            self._send_refusal()
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._ended:  # a request that was aborted or refused after its headers has no cycle
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        if not self._ended:
            super().on_message_complete()

    @property
    def _ended(self) -> bool:
        return self._refused or self.transport.is_closing()

    def _send_refusal(self) -> None:
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
        self._start("unread", self.bounds.read_timeout, "the client does not read")

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("unread")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop(*self._timers)
        super().connection_lost(exc)

    def _expect_head(self) -> None:
        self._start("head", self.bounds.header_timeout, "incomplete request headers")

    def _start(self, timer: str, seconds: float, why: str) -> None:
        self._timers[timer] = self.loop.call_later(seconds, self._abort, why)

    def _stop(self, *timers: str) -> None:
        for timer in timers:
            if timer in self._timers:
                self._timers.pop(timer).cancel()

    def _abort(self, why: str) -> None:
        log.debug("aborted connection: %s", why)
        self._stop("head")
        self.transport.abort()


log = logging.getLogger(__name__)

_GRACE = 3
"""Seconds to send the last responses after the server has ended all running requests."""

STEP_TIMEOUT = 5.0
"""Seconds to wait at shutdown for the engine's current step."""

_LOOK = 0.05
"""Seconds between checks, at shutdown, whether requests run."""

_PAUSE = 1.0
"""Seconds to pause accepting connections after it failed for lack of file descriptors or memory."""


def freeze_loaded() -> None:
    """Excludes everything loaded so far from garbage collection. It lives until the process ends, and a full collection
    scans it for up to a second, in which all clients wait."""
    gc.collect()
    gc.freeze()


class Server(uvicorn.Server):
    """One application on sockets that are already bound.

    At shutdown, running requests have `drain_timeout` seconds to finish. The server answers new ones with 503,
    so that their senders try another server. Then `leave` ends the remaining requests: streams with an error event,
    others with 503. After a grace period, the server aborts the remaining connections. If `leave` returns False, the
    server exits without further waiting.

    Args:
        app: the application.
        bounds: limits of its connections.
        drain_timeout: seconds that running requests have to finish.
        leave: ends all running requests; called in a thread. Returns False if the engine is stuck in a step.
        **options: other options of `uvicorn.Config`.
    """

    def __init__(
        self, app: FastAPI, bounds: ConnectionBounds, *, drain_timeout: float, leave: Callable[[], bool | None],
        **options: Any,
    ) -> None:  # fmt: skip
        self.bounds, self._drain_timeout, self._leave = bounds, drain_timeout, leave
        app.state.ending = lambda: self.should_exit
        """Whether endless streams must end now."""
        self._connection = type("Connection", (BoundedConnection,), {"bounds": bounds})
        fixed: dict[str, Any] = {"ws": "none", "lifespan": "on", "log_config": None, "access_log": False}
        super().__init__(uvicorn.Config(app, http=self._connection, server_header=False, **fixed, **options))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the shutdown; a second Ctrl-C ends the process at once, because a step may hang."""
        super().handle_exit(sig, frame)
        if self.force_exit:
            log.warning("interrupted again: running requests are not finished")
            logging.shutdown()
            os._exit(128 + sig)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs uvicorn's start-up with bounded TLS handshakes."""
        raise_descriptor_limit()
        config = self.config
        if config.ssl is None or not sockets:
            await super().startup(sockets)
            return
        await super().startup([])
        for each in sockets:
            each.setblocking(False)
            each.listen(config.backlog)
            self.servers.append(TlsListener(self, each))  # type: ignore[arg-type]  # uvicorn calls close, wait_closed

    def new_connection(self, *, beyond_limit: bool) -> BoundedConnection:
        """Creates the protocol of a connection."""
        made = self._connection(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)
        made.beyond_limit = beyond_limit
        return made

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs uvicorn's shutdown with a time limit, when no request runs any more."""
        begin, open_now = time.monotonic(), len(self.server_state.connections)
        text = "shutting down: %d connections; running requests have up to %g s to finish"
        log.info(text, open_now, self._drain_timeout)
        ending = asyncio.create_task(self._end())
        try:
            while self.server_state.tasks and not (self.force_exit or ending.done()):
                await asyncio.sleep(_LOOK)
            await super().shutdown(sockets)
            log.info("stopped after %.1f s", time.monotonic() - begin)
        finally:
            ending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await ending

    async def _end(self) -> None:
        await asyncio.sleep(self._drain_timeout)
        left = await asyncio.to_thread(self._leave)
        await asyncio.sleep(_GRACE)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if left is False:
            self.force_exit = True  # otherwise uvicorn waits for handlers that wait for the engine


class TlsListener:
    """Accepts TLS connections of a server on one socket. Has the methods of `asyncio.Server` that uvicorn calls.

    asyncio's servers count a connection only after its handshake, so silent clients could open any number of them. This
    listener counts a connection as soon as it is accepted, and `header_timeout` also limits the handshake.
    """

    def __init__(self, server: Server, listening: socket.socket) -> None:
        self._server, self._listening = server, listening
        self._handshakes = set[asyncio.Task[None]]()
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting connections and cancels handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until all handshakes have ended."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop, most = asyncio.get_running_loop(), self._server.bounds.max_connections
        while True:
            try:
                wire, _ = await loop.sock_accept(self._listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("could not accept a connection: %s; retrying in %g s", error, _PAUSE)
                await asyncio.sleep(_PAUSE)
                continue
            open_now = len(self._server.server_state.connections) + len(self._handshakes)
            if open_now >= most + reserve(most):
                log.debug("connection closed: too many connections")
                wire.close()
                continue
            handshake = asyncio.create_task(self._shake_hands(wire, refuse=open_now >= most))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, wire: socket.socket, *, refuse: bool) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                partial(self._server.new_connection, beyond_limit=refuse), wire,
                ssl=self._server.config.ssl, ssl_handshake_timeout=self._server.bounds.header_timeout,
            )  # fmt: skip
        except OSError as error:  # an error or a timeout of the client
            log.debug("TLS handshake failed: %s", error)
