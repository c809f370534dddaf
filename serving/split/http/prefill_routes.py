"""Endpoints of a prefill worker: compute a prompt, and offer its state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from serving.api.http.connection.streaming import until_gone
from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError
from serving.engine.async_engine import AsyncEngine
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.split.http.offering import add_offering, sweep, worker_errors
from serving.split.http.prompts import ApiKind, prompt_of
from serving.split.http.sealed import sealed
from serving.split.manifest import Manifest
from serving.split.prefill_side import ONCE, Export, PrefillSide, fed_tokens, ticket_of
from serving.split.seal import Seal
from serving.split.wire import Handoff, Ticket

log = logging.getLogger(__name__)


class PrefillRequest(BaseModel):
    """A request to a decode worker, whose prompt is to be computed."""

    kind: ApiKind
    body: dict[str, Any]
    handoff: Handoff = "full"
    seconds: float = Field(600.0, gt=0)
    """Maximum seconds to compute the prompt; the router does not wait longer."""


def prefill_router(side: PrefillSide, url: str, *, seal: Seal | None = None) -> APIRouter:
    """Returns the endpoints of one prefill worker, which others reach at `url`. `seal` authenticates messages."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        sweeping = asyncio.create_task(sweep(app, side))
        yield
        sweeping.cancel()
        side.worker.close()

    router = APIRouter(prefix="/split", tags=["split"], lifespan=lifespan, dependencies=[sealed(seal or Seal())])

    @router.get("/manifest", response_model=Manifest)
    async def manifest() -> Manifest:
        """The settings that determine this worker's states."""
        return side.worker.manifest

    add_offering(router, side, url)

    @router.post("/prefill", response_model=Ticket)
    async def prefill(body: PrefillRequest, request: Request) -> Ticket:
        """Compute a prompt, and hold its state until it is fetched or its lease expires."""
        context = context_of(request)
        with worker_errors("a decode worker"):
            return await until_gone(request.receive, _prefill(context, side, body, url, request.headers))

    @router.get("/status")
    async def status(request: Request) -> dict[str, Any]:
        """Counters."""
        return await context_of(request).engine.call(
            lambda _: {"role": "prefill", "kept": side.kept} | asdict(side.stats)
        )

    return router


async def _prefill(context: Context, side: PrefillSide, body: PrefillRequest, url: str, headers: Headers) -> Ticket:
    prompt, priority, salt, lora = await prompt_of(context, body.kind, body.body, headers)
    fed = fed_tokens(prompt, body.handoff)
    if not fed:
        return ticket_of(side, None, prompt, body.handoff, worker=url)
    engine, id, name = context.engine, secrets.token_hex(16), f"prefill-{uuid.uuid4().hex}"
    last: RequestOutput | None = None
    beating = asyncio.create_task(_beat(engine, side, id))
    try:
        async with asyncio.timeout(body.seconds):
            export: Export = await engine.call(lambda _: side.begin(id))
            run = EngineRequest(name, {"prompt_token_ids": fed}, ONCE, priority, salt, export=export, lora_request=lora)
            async with contextlib.aclosing(engine.stream(run)) as each:
                async for output in each:
                    last = output
        assert last is not None
    except BaseException as error:
        # The request was refused, aborted or too late, or the router disconnected, so no worker will fetch the state.
        # Commands run in order, so the release follows `begin` even if `begin` has not run yet.
        engine.tell(lambda _: side.release(id, wanted=False))
        if isinstance(error, TimeoutError):
            raise ApiError(503, "the prompt was not computed in time", code="too_late") from None
        raise
    finally:
        beating.cancel()
    return ticket_of(
        side, export, prompt, body.handoff,
        worker=url, cached_tokens=last.num_cached_tokens, adapter_name=None if lora is None else lora.lora_name,
    )  # fmt: skip


async def _beat(engine: AsyncEngine, side: PrefillSide, id: str) -> None:
    """Renews a lease while its prompt waits or is computed."""
    while True:
        await asyncio.sleep(side.lease / 4)
        engine.tell(lambda _: side.renew([id]))
