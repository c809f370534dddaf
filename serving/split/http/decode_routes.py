"""Endpoints of a decode worker: it is told of a state before the request comes that will go on from it."""

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
from serving.split.http.offering import add_offering, sweep
from serving.split.http.peer import HttpPeer
from serving.split.http.sealed import sealed
from serving.split.manifest import Manifest, ManifestMismatch
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.seal import Seal
from serving.split.wire import SplitError, Ticket

log = logging.getLogger(__name__)

_BEAT = 2.0
"""Seconds between two renewals of the leases that are waited for, at most."""
_HANDSHAKE = 10.0
_AGAIN = 2.0
"""Seconds for which a worker that could not be reached is not tried again."""


def decode_router(
    side: DecodeSide,
    *,
    seal: Seal | None = None,
    allowed: Sequence[str] = (),
    keys: Sequence[str] = (),
    sharing: tuple[PrefillSide, str] | None = None,
) -> APIRouter:
    """The endpoints of one decode worker.

    Args:
        side: what they speak for.
        seal: only messages with it count.
        allowed: URLs of the prefill workers that states may be fetched from; none = all that a sealed message names.
        keys: API keys of the fleet; the first is sent to prefill workers.
        sharing: what lends its states to others, and the URL by which they reach it.
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
        try:
            if ticket.shared and not await engine.call(lambda _: side.pays(ticket)):
                return {"accepted": False}
            await engine.call(lambda _: side.expect(ticket.prompt_token_ids, remote, ticket.lease))
        except TooMany as error:
            raise ApiError(503, str(error), code="too_many_expected", headers={"Retry-After": "1"}) from None
        return {"accepted": True}

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """Counters."""
        return await context_of(request).engine.call(lambda _: {"role": "decode"} | asdict(side.stats))

    return router


async def _beat(app: FastAPI, side: DecodeSide) -> None:
    """What is waited for is not let go over there."""
    context: Context = app.state.context
    while True:
        await asyncio.sleep(_BEAT)
        context.engine.tell(lambda _: side.renew())


class _Peers:
    """Prefill workers that have shaken hands."""

    def __init__(self, side: DecodeSide, seal: Seal, allowed: Sequence[str], keys: Sequence[str]) -> None:
        self._side, self._seal, self._keys = side, seal, keys
        self._allowed = frozenset(url.rstrip("/") for url in allowed)
        self._peers: dict[str, HttpPeer] = {}
        self._failed: dict[str, tuple[float, str]] = {}
        # One handshake at a time with each worker: many first requests share one, and no request waits for the
        # handshake with another worker.
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def get(self, url: str, manifest: str) -> HttpPeer:
        """The worker at `url`, whose manifest has this digest; another one has been started there since, else.

        Raises:
            ApiError: it is none of those that are allowed.
            ManifestMismatch, SplitError: as `HttpPeer.connect` does.
        """
        url = url.rstrip("/")
        if self._allowed and url not in self._allowed:
            raise ApiError(403, f"{url[:200]} is none of this worker's peers", code="peer_not_allowed")
        async with self._locks[url]:
            peer = self._peers.get(url)
            if peer is None or peer.manifest.digest != manifest:
                since, why = self._failed.get(url, (0.0, ""))
                if time.monotonic() - since < _AGAIN and why:
                    raise SplitError(why)
                try:
                    found = await HttpPeer.connect(
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
                peer = self._peers[url] = found
            return peer

    async def close(self) -> None:
        for peer in self._peers.values():
            await peer.close()
