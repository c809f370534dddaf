"""uvicorn with bounded connections and a graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from serving.api.http.connection.connections import BoundedConnection, bounded, raise_descriptor_limit
from serving.api.http.connection.tls import TlsListener
from serving.api.http.settings import ConnectionBounds

_GRACE = 3
"""Seconds to send the last responses after the server has ended all running requests."""

STEP_TIMEOUT = 5.0
"""Seconds to wait at shutdown for the engine's current step."""


class Server(uvicorn.Server):
    """One application on sockets that are already bound.

    At shutdown the server accepts no new connections, and running requests have `drain_timeout` seconds to finish. Then
    `leave` ends the remaining requests: streams with an error event, others with 503. After a grace period the server
    aborts the remaining connections. If `leave` returns False, the server exits without further waiting.

    Args:
        app: the application.
        bounds: limits of its connections.
        drain_timeout: seconds that running requests have to finish.
        leave: ends all running requests; called in a thread. Returns False if the engine is stuck in a step.
        **options: other options of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        bounds: ConnectionBounds,
        *,
        drain_timeout: float,
        leave: Callable[[], bool | None],
        **options: Any,
    ) -> None:
        self._drain_timeout, self._leave = drain_timeout, leave
        self._bounds = bounds
        app.state.ending = lambda: self.should_exit
        """Whether endless streams must end now."""
        self._connection = bounded(bounds)
        super().__init__(
            uvicorn.Config(
                app,
                http=self._connection,
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                lifespan="on",
                **options,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs uvicorn's start-up with bounded TLS handshakes."""
        raise_descriptor_limit()
        config = self.config
        if config.ssl is None or not sockets:
            await super().startup(sockets)
            return
        await super().startup([])

        def connection() -> BoundedConnection:
            return self._connection(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        for each in sockets:
            listener = TlsListener(
                each, config.ssl, self._bounds, self.server_state.connections, connection, backlog=config.backlog
            )
            self.servers.append(listener)  # type: ignore[arg-type]  # uvicorn only calls close and wait_closed

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Runs uvicorn's shutdown with a time limit."""
        ending = asyncio.create_task(self._end())
        try:
            await super().shutdown(sockets)
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
