"""uvicorn with bounded connections and a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import socket
import ssl
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI

from serving.api.http.connection.connections import BoundedConnection, bounded, raise_descriptor_limit, reserve
from serving.api.http.settings import ConnectionBounds

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
        self._drain_timeout, self._leave = drain_timeout, leave
        self._bounds = bounds
        app.state.ending = lambda: self.should_exit
        """Whether endless streams must end now."""
        self._connection = bounded(bounds)
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

        def connection(*, beyond_limit: bool) -> BoundedConnection:
            made = self._connection(config=config, server_state=self.server_state, app_state=self.lifespan.state)
            made.beyond_limit = beyond_limit
            return made

        for each in sockets:
            each.setblocking(False)
            each.listen(config.backlog)
            listener = TlsListener(each, config.ssl, self._bounds, self.server_state.connections, connection)
            self.servers.append(listener)  # type: ignore[arg-type]  # uvicorn only calls close and wait_closed

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


@dataclass(eq=False)
class TlsListener:
    """Accepts TLS connections on one socket. Has the methods of `asyncio.Server` that uvicorn calls.

    asyncio's servers count a connection only after its handshake, so silent clients could open any number of them. This
    listener counts a connection as soon as it is accepted.
    """

    listening: socket.socket
    context: ssl.SSLContext
    """Contains the server's certificate."""
    bounds: ConnectionBounds
    """`header_timeout` also limits the handshake."""
    connections: Collection[object]
    """Connections after the handshake, on all sockets."""
    new_connection: Callable[..., BoundedConnection]
    _handshakes: set[asyncio.Task[None]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    def close(self) -> None:
        """Stops accepting connections and cancels handshakes."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Waits until all handshakes have ended."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _accept(self) -> None:
        loop, most = asyncio.get_running_loop(), self.bounds.max_connections
        while True:
            try:
                wire, _ = await loop.sock_accept(self.listening)
            except ConnectionAbortedError:
                continue
            except OSError as error:
                log.error("could not accept a connection: %s; retrying in %g s", error, _PAUSE)
                await asyncio.sleep(_PAUSE)
                continue
            open_now = len(self.connections) + len(self._handshakes)
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
                partial(self.new_connection, beyond_limit=refuse), wire,
                ssl=self.context, ssl_handshake_timeout=self.bounds.header_timeout,
            )  # fmt: skip
        except OSError as error:  # an error or a timeout of the client
            log.debug("TLS handshake failed: %s", error)
