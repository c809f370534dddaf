"""uvicorn with bounded connections, and an end that every client is told of."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import Any

import uvicorn
from fastapi import FastAPI

from serving.api.http.connections import BoundedConnection, bounded, raise_descriptor_limit
from serving.api.http.settings import ConnectionBounds
from serving.api.http.tls import TlsListener

_GRACE = 3
"""Seconds for the last answers, once everything that ran has been ended."""


STEP_TIMEOUT = 5.0
"""Seconds that the step which runs when draining is over may take."""


class Server(uvicorn.Server):
    """One application on sockets that are bound already.

    At shutdown no new connection is taken, and running requests get `drain_timeout` seconds to end. Those that have not
    ended then are ended by `leave`: streams with an error event, the rest with 503. Connections that do not take even
    that are cut off. Where `leave` cannot end the engine, nothing else is waited for.

    Args:
        app: the application.
        bounds: of its connections.
        drain_timeout: seconds.
        leave: ends all requests that still run; called in a thread. False: a step of the engine does not end.
        **options: further ones of `uvicorn.Config`.
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
        """Whether streams without an end are to end now."""
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
        """What uvicorn does, with bounded TLS handshakes."""
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
            self.servers.append(listener)  # type: ignore[arg-type]  # uvicorn closes it and waits, no more

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """What uvicorn does, with an end to it."""
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
            self.force_exit = True  # or uvicorn would wait for handlers that wait for the engine
