"""The common endpoints of both roles, and those of workers that offer states: handshake, hold, copy, renew, release."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request

from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.engine.async_engine import AsyncEngine
from serving.split.http.peer import HandshakeRequest, Release, RenewRequest
from serving.split.manifest import Manifest, ManifestMismatch, check
from serving.split.prefill_side import PrefillSide, TooMany
from serving.split.seal import HEADER, RECEIVER, Seal, SealChecker
from serving.split.wire import AdapterMismatch, Offer, ShareRequest, SplitError, StateRequest, Ticket
from serving.split.worker import Worker

log = logging.getLogger(__name__)

_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (ManifestMismatch, 409, "manifest_mismatch"),
    (AdapterMismatch, 409, "adapter_mismatch"),
    (TooMany, 503, "too_many_states"),
)


def sealed(seal: Seal) -> Any:
    """Returns a dependency for the endpoints of a role: 401 for messages without the fleet's signature."""
    checker = SealChecker(seal)

    async def check(request: Request) -> None:
        if not checker.holds(request.headers.get(HEADER, ""), request.url.path, await request.body()):
            raise ApiError(
                401, "this path requires a message signed with the fleet's secret", code="not_sealed",
                headers={RECEIVER: checker.name},
            )  # fmt: skip

    return Depends(check)


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


Beat = tuple[float, Callable[[], object]]
"""Seconds between two calls, and the call."""


async def repeat(engine: AsyncEngine, seconds: float, call: Callable[[], object]) -> None:
    """Calls a function on the engine's thread every `seconds`, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        engine.tell(lambda _: call())


def role_router(
    worker: Worker,
    seal: Seal,
    status: Callable[[], dict[str, Any]],
    beats: Sequence[Beat],
    close: Callable[[], Awaitable[None]] | None = None,
) -> APIRouter:
    """Returns the common endpoints of both roles. `seal` authenticates messages, and `status` returns counters; it is
    called on the engine's thread. `beats` run while the server runs; at its end, `close` and the transports close."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context: Context = app.state.context
        tasks = [asyncio.create_task(repeat(context.engine, *beat)) for beat in beats]
        yield
        for task in tasks:
            task.cancel()
        if close is not None:
            await close()
        worker.close()

    router = APIRouter(prefix="/split", tags=["split"], lifespan=lifespan, dependencies=[sealed(seal)])

    @router.get("/manifest", response_model=Manifest)
    async def manifest() -> Manifest:
        """The settings that determine this worker's states."""
        return worker.manifest

    @router.get("/status")
    async def counters(request: Request) -> dict[str, Any]:
        """Counters."""
        return await context_of(request).engine.call(lambda _: status())

    return router


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


def sweeping(side: PrefillSide) -> Beat:
    """Removes expired leases while the engine is idle."""
    return max(0.05, side.lease / 4), side.sweep
