"""Endpoints of workers that offer states: handshake, hold, copy, renew and release."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator

from fastapi import APIRouter, FastAPI, Request

from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.engine.engine_thread import EngineStopped
from serving.split.http.peer import HandshakeRequest, Release, RenewRequest
from serving.split.manifest import Manifest, ManifestMismatch, check
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.wire import AdapterMismatch, Offer, ShareRequest, SplitError, StateRequest, Ticket

log = logging.getLogger(__name__)


_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (ManifestMismatch, 409, "manifest_mismatch"),
    (AdapterMismatch, 409, "adapter_mismatch"),
    (TooMany, 503, "too_many_states"),
)


@contextlib.contextmanager
def worker_errors(peer: str, otherwise: tuple[int, str] = (410, "state_gone")) -> Iterator[None]:
    """Converts exceptions about states of workers to error responses. `otherwise`: status and code of a `SplitError`
    without a row in the table.

    Raises:
        ApiError: the block raised such an exception.
    """
    try:
        yield
    except (ManifestMismatch, SplitError) as error:
        rows = ((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
        status, code = next(rows, otherwise)
        if isinstance(error, ManifestMismatch):
            log.error("refused %s: %s", peer, error)
        raise ApiError(status, str(error), code=code, headers={"Retry-After": "1"} if status == 503 else None) from None


def add_offering(router: APIRouter, side: PrefillSide, url: str) -> None:
    """Adds the endpoints to `router`; other workers reach this one at `url`."""

    @router.post("/hello", response_model=Manifest)
    async def hello(body: HandshakeRequest) -> Manifest:
        """A decode worker's handshake; 409 if the two workers cannot exchange states."""
        with worker_errors("a decode worker"):
            for notice in check(side.worker.manifest, body.manifest):
                log.warning("decode worker: %s", notice)
        return side.worker.manifest

    @router.post("/share", response_model=Ticket)
    async def share(wanted: ShareRequest, request: Request) -> Ticket:
        """Hold a cached state until another worker has fetched it or its lease expires."""
        with worker_errors("a decode worker"):
            return await context_of(request).engine.call(lambda _: side.share(wanted, url=url))

    @router.post("/offer", response_model=Offer)
    async def offer(want: StateRequest, request: Request) -> Offer:
        """Copy the part of a state that a decode worker does not have, for it to fetch."""
        with worker_errors("a decode worker"):
            return await context_of(request).engine.call(lambda _: side.offer(want))

    @router.post("/renew")
    async def renew(body: RenewRequest, request: Request) -> dict[str, bool]:
        """Renew the leases of states."""
        await context_of(request).engine.call(lambda _: side.renew(body.ids))
        return {"renewed": True}

    @router.post("/release")
    async def release(body: Release, request: Request) -> dict[str, bool]:
        """Drop a state that was fetched or is not needed."""
        await context_of(request).engine.call(lambda _: side.release(body.id, wanted=body.wanted))
        return {"released": True}


async def sweep(app: FastAPI, side: PrefillSide) -> None:
    """Removes expired leases while the engine is idle."""
    context: Context = app.state.context
    while True:
        await asyncio.sleep(max(0.05, side.lease / 4))
        with contextlib.suppress(EngineStopped):
            await context.engine.call(lambda _: side.sweep())
