"""Endpoints of a decode worker: it is told of a state before the request comes that will go on from it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request

from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.disagg.decode_side import DecodeSide
from serving.disagg.http.peer import HttpPeer
from serving.disagg.manifest import Manifest, ManifestMismatch
from serving.disagg.wire import SplitError, Ticket

log = logging.getLogger(__name__)


def decode_router(side: DecodeSide) -> APIRouter:
    """The endpoints of one decode worker."""
    peers = _Peers(side)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        peers.close()
        side.worker.close()

    router = APIRouter(prefix="/split", tags=["split"], lifespan=lifespan)

    @router.get("/manifest", response_model=Manifest)
    async def manifest() -> Manifest:
        """What this worker's states are like."""
        return side.worker.manifest

    @router.post("/expect")
    async def expect(ticket: Ticket, request: Request) -> dict[str, bool]:
        """The next request for the ticket's prompt goes on from its state."""
        try:
            peer = await peers.get(ticket.worker, ticket.manifest)
            remote = side.accept(peer, ticket)
        except ManifestMismatch as error:
            log.error("prefill worker %s was refused: %s", ticket.worker, error)
            raise ApiError(409, str(error), code="manifest_mismatch") from None
        except SplitError as error:
            raise ApiError(502, str(error), code="peer_unreachable") from None
        if remote is None:
            return {"accepted": False}
        engine = context_of(request).engine
        await engine.call(lambda _: side.expect(ticket.prompt_token_ids, remote, ticket.lease))
        return {"accepted": True}

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """Counters."""
        return await context_of(request).engine.call(lambda _: {"role": "decode"} | asdict(side.stats))

    return router


class _Peers:
    """Prefill workers that have shaken hands."""

    def __init__(self, side: DecodeSide) -> None:
        self._side = side
        self._peers: dict[str, HttpPeer] = {}
        self._lock = asyncio.Lock()

    async def get(self, url: str, manifest: str) -> HttpPeer:
        """The worker at `url`, whose manifest has this digest; another one has been started there since, else."""
        # One handshake at a time: a crowd of first requests needs no more than one.
        async with self._lock:
            peer = self._peers.get(url)
            if peer is None or peer.manifest.digest != manifest:
                side = self._side
                peer = await asyncio.to_thread(
                    HttpPeer.connect,
                    url,
                    side.worker.manifest,
                    timeout=side.timeout,
                )
                self._peers[url] = peer
            return peer

    def close(self) -> None:
        for peer in self._peers.values():
            peer.close()
