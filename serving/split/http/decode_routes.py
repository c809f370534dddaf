"""Endpoints of a decode worker. The router announces a state before it sends the request that uses it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.split.decode_side import DecodeSide
from serving.split.http.offering import add_offering, sweep, worker_errors
from serving.split.http.peer import HttpPeer
from serving.split.http.sealed import sealed
from serving.split.manifest import Manifest
from serving.split.prefill_side import PrefillSide
from serving.split.seal import Seal
from serving.split.wire import SplitError, Ticket

log = logging.getLogger(__name__)

_BEAT = 2.0
"""Seconds between renewals of leases."""
_HANDSHAKE = 10.0
_AGAIN = 2.0
"""Seconds before connecting again to a worker that was unreachable."""


def decode_router(
    side: DecodeSide,
    *,
    seal: Seal | None = None,
    allowed: Sequence[str] = (),
    keys: Sequence[str] = (),
    sharing: tuple[PrefillSide, str] | None = None,
) -> APIRouter:
    """Returns the endpoints of one decode worker.

    Args:
        side: the worker's decode side.
        seal: authenticates messages; the worker refuses all others.
        allowed: URLs of prefill workers to fetch states from; empty for all workers that signed messages name.
        keys: API keys of the fleet; the first is sent to prefill workers.
        sharing: shares this worker's states with others, which reach it at this URL.
    """
    seal = seal or Seal()
    peers = _Peers(side, seal, allowed, keys)

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(_beat(app, side))]
        if sharing is not None:
            tasks.append(asyncio.create_task(sweep(app, sharing[0])))
        yield
        for task in tasks:
            task.cancel()
        await peers.close()
        side.worker.close()

    router = APIRouter(prefix="/split", tags=["split"], lifespan=lifespan, dependencies=[sealed(seal)])

    if sharing is not None:
        add_offering(router, *sharing)

    @router.get("/manifest", response_model=Manifest)
    async def manifest() -> Manifest:
        """The settings that determine this worker's states."""
        return side.worker.manifest

    @router.post("/expect")
    async def expect(ticket: Ticket, request: Request) -> dict[str, bool]:
        """Make the next request for the ticket's prompt continue from the ticket's state."""
        with worker_errors(f"prefill worker {ticket.worker}", otherwise=(502, "peer_unreachable")):
            peer = await peers.get(ticket.worker, ticket.manifest)
            remote = side.accept(peer, ticket)
            if remote is None:
                return {"accepted": False}
            engine = context_of(request).engine
            if ticket.shared and not await engine.call(lambda _: side.worth_fetching(ticket)):
                return {"accepted": False}
            await engine.call(lambda _: side.expect(ticket.prompt_token_ids, remote, ticket.lease))
        return {"accepted": True}

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """Counters."""
        return await context_of(request).engine.call(lambda _: {"role": "decode"} | asdict(side.stats))

    return router


async def _beat(app: FastAPI, side: DecodeSide) -> None:
    """Renews the leases of the states that requests wait for."""
    context: Context = app.state.context
    while True:
        await asyncio.sleep(_BEAT)
        context.engine.tell(lambda _: side.renew())


class _Peers:
    """Prefill workers after their handshake."""

    def __init__(self, side: DecodeSide, seal: Seal, allowed: Sequence[str], keys: Sequence[str]) -> None:
        self._side, self._seal, self._keys = side, seal, keys
        self._allowed = frozenset(url.rstrip("/") for url in allowed)
        self._peers: dict[str, HttpPeer] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        # One handshake at a time per worker: concurrent first requests share it, and no request waits for the handshake
        # with another worker.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, url: str, manifest: str) -> HttpPeer:
        """Returns the worker at `url`. Connects again if the worker was restarted, that is, if the digest of its
        manifest is not `manifest`.

        Raises:
            ApiError: the worker is not allowed.
            ManifestMismatch, SplitError: see `HttpPeer.connect`.
        """
        url = url.rstrip("/")
        if self._allowed and url not in self._allowed:
            raise ApiError(403, f"{url[:200]} is not an allowed peer", code="peer_not_allowed")
        async with self._locks[url]:
            peer = self._peers.get(url)
            if peer is None or peer.manifest.digest != manifest:
                since, why = self._failed.get(url, (0.0, ""))
                if time.monotonic() - since < _AGAIN and why:
                    raise SplitError(why)
                try:
                    connected = await HttpPeer.connect(
                        url,
                        self._side.worker.manifest,
                        seal=self._seal,
                        keys=self._keys,
                        timeout=min(_HANDSHAKE, self._side.timeout),
                    )
                except SplitError as error:
                    self._failed[url] = time.monotonic(), str(error)
                    raise
                # The previous peer may still be in use; it closes with its last reference.
                peer = self._peers[url] = connected
            return peer

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.close()
