"""A TLS listener that counts handshakes as connections.

asyncio's servers count a connection only after its handshake, so silent clients could open any number of them. This
listener counts a connection as soon as it is accepted.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Collection

from serving.api.http.connection.connections import BoundedConnection, reserve
from serving.api.http.settings import ConnectionBounds

log = logging.getLogger(__name__)

_PAUSE = 1.0
"""Seconds to pause accepting connections after it failed for lack of file descriptors or memory."""


class TlsListener:
    """Accepts connections on one socket. Has the methods of `asyncio.Server` that uvicorn calls.

    Args:
        listening: a bound socket.
        context: contains the server's certificate.
        bounds: limits of connections; `header_timeout` also limits the handshake.
        connections: connections after the handshake, on all sockets.
        new_connection: creates a connection's protocol.
    """

    def __init__(
        self,
        listening: socket.socket,
        context: ssl.SSLContext,
        bounds: ConnectionBounds,
        connections: Collection[object],
        new_connection: Callable[[], BoundedConnection],
        *,
        backlog: int,
    ) -> None:
        self._socket, self._context, self._bounds = listening, context, bounds
        self._connections, self._new_connection = connections, new_connection
        self._handshakes: set[asyncio.Task[None]] = set()
        self._closed = False
        self._loop = asyncio.get_running_loop()
        listening.setblocking(False)
        listening.listen(backlog)
        self._loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Stops accepting connections and cancels handshakes."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._socket)
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Waits until all handshakes have ended."""
        await asyncio.gather(*self._handshakes, return_exceptions=True)

    def _accept(self) -> None:
        try:
            wire, _ = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("could not accept a connection: %s; retrying in %g s", error, _PAUSE)
            self._loop.remove_reader(self._socket)
            self._loop.call_later(_PAUSE, self._accept_again)
            return
        most, open_now = self._bounds.max_connections, len(self._connections) + len(self._handshakes)
        if open_now >= most + reserve(most):
            log.debug("connection closed: too many connections")
            wire.close()
            return
        wire.setblocking(False)
        handshake = self._loop.create_task(self._shake_hands(wire, refuse=open_now >= most))
        self._handshakes.add(handshake)
        handshake.add_done_callback(self._handshakes.discard)

    def _accept_again(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._socket, self._accept)

    async def _shake_hands(self, wire: socket.socket, *, refuse: bool) -> None:
        def protocol() -> BoundedConnection:
            connection = self._new_connection()
            connection.beyond_limit = refuse
            return connection

        try:
            await self._loop.connect_accepted_socket(
                protocol, wire, ssl=self._context, ssl_handshake_timeout=self._bounds.header_timeout
            )
        except OSError as error:  # an error or a timeout of the client
            log.debug("TLS handshake failed: %s", error)
