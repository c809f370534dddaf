"""Endpoints of every worker that has states for others: shake hands, hold, copy what is lacked, let go."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastapi import APIRouter, FastAPI, Request

from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.engine.async_engine import EngineStopped
from serving.split.http.peer import Hello, Release, Renew
from serving.split.manifest import Manifest, ManifestMismatch, check
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.wire import Offer, ShareRequest, SplitError, StateRequest, Ticket

log = logging.getLogger(__name__)


def add_offering(router: APIRouter, side: PrefillSide, url: str) -> None:
    """Add them to a worker's router; others reach it at `url`."""

    @router.post("/hello", response_model=Manifest)
    async def hello(body: Hello) -> Manifest:
        """A decode worker's handshake: refused (409) where the two cannot exchange states."""
        try:
            for notice in check(side.worker.manifest, body.manifest):
                log.warning("a decode worker: %s", notice)
        except ManifestMismatch as error:
            log.error("a decode worker was refused: %s", error)
            raise ApiError(409, str(error), code="manifest_mismatch") from None
        return side.worker.manifest

    @router.post("/share", response_model=Ticket)
    async def share(asked: ShareRequest, request: Request) -> Ticket:
        """Keep a state that is there until another worker has fetched it, or its lease runs out."""
        try:
            return await context_of(request).engine.call(lambda _: side.share(asked, url=url))
        except TooMany as error:
            raise ApiError(503, str(error), code="too_many_states", headers={"Retry-After": "1"}) from None
        except SplitError as error:
            raise ApiError(410, str(error), code="state_gone") from None

    @router.post("/offer", response_model=Offer)
    async def offer(want: StateRequest, request: Request) -> Offer:
        """Copy what a decode worker lacks; it can then be fetched."""
        try:
            return await context_of(request).engine.call(lambda _: side.offer(want))
        except TooMany as error:
            raise ApiError(503, str(error), code="too_many_copies", headers={"Retry-After": "1"}) from None
        except SplitError as error:
            raise ApiError(410, str(error), code="state_gone") from None

    @router.post("/renew")
    async def renew(body: Renew, request: Request) -> dict[str, bool]:
        """States are still waited for."""
        await context_of(request).engine.call(lambda _: side.renew(body.ids))
        return {"renewed": True}

    @router.post("/release")
    async def release(body: Release, request: Request) -> dict[str, bool]:
        """A state has been fetched, or is not wanted."""
        await context_of(request).engine.call(lambda _: side.release(body.id, wanted=body.wanted))
        return {"released": True}


async def sweep(app: FastAPI, side: PrefillSide) -> None:
    """Leases run out also while nothing happens."""
    context: Context = app.state.context
    while True:
        await asyncio.sleep(max(0.05, side.lease / 4))
        with contextlib.suppress(EngineStopped):
            await context.engine.call(lambda _: side.sweep())
