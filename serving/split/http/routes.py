"""Endpoints of a worker under `/split`: compute a prompt, offer its state, and expect the state of another worker.

The router announces a state to a decode worker before it sends the request that uses it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Request
from pydantic import BaseModel, Field
from starlette.datastructures import Headers

from serving.api.http.apis.inputs import tokenized
from serving.api.http.apis.text_api import TEXT_APIS
from serving.api.http.connection.keys import client_id, has_several_keys, salt_of, sent_key
from serving.api.http.connection.streaming import until_gone
from serving.api.http.context import Context, context_of
from serving.api.http.errors import ApiError, validated
from serving.engine.async_engine import AsyncEngine
from serving.engine.requests.output import RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.split.decode_side import DecodeSide
from serving.split.http.peer import HandshakeRequest, HttpPeer, Release, RenewRequest
from serving.split.http.transfer_params import decoding, prefilling
from serving.split.prefill_side import ONCE, Export, PrefillSide, TooMany, fed_tokens
from serving.split.seal import HEADER, RECEIVER, Seal, SealChecker
from serving.split.settings import SplitSettings
from serving.split.wire import (
    AdapterMismatch,
    Handoff,
    Manifest,
    ManifestMismatch,
    Offer,
    ShareRequest,
    SplitError,
    StateRequest,
    Ticket,
    check,
)
from serving.split.worker import Worker

log = logging.getLogger(__name__)

_RENEWAL = 2.0  # seconds between renewals of leases
_HANDSHAKE = 10.0
_AGAIN = 2.0  # seconds before connecting again to a worker that was unreachable
_MAX_PEERS = 256
_STATUSES: tuple[tuple[type[Exception], int, str], ...] = (
    (ManifestMismatch, 409, "manifest_mismatch"),
    (AdapterMismatch, 409, "adapter_mismatch"),
    (TooMany, 503, "too_many_states"),
)


def worker_router(
    worker: Worker,
    settings: SplitSettings,
    *,
    offers: PrefillSide | None = None,
    decodes: DecodeSide | None = None,
    keys: Sequence[str] = (),
) -> APIRouter:
    """Returns the endpoints of one worker. With a secret, its server also reads `kv_transfer_params`.

    Args:
        worker: the worker; its transports close when the server ends.
        settings: its `seal` authenticates messages; the worker refuses all others. States are fetched from the prefill
            workers in `peer`, or from all that signed messages name if it is empty.
        offers: the side that offers states. Without `decodes`, it also computes prompts for other workers.
        decodes: the side that continues from states of other workers.
        keys: API keys of the fleet; the first is sent to prefill workers.
    """
    seal = settings.seal
    peers: _Peers | None = None
    beats: list[tuple[float, Callable[[], object]]] = []
    if offers is not None:  # expired leases are removed while the engine is idle, too
        beats.append((max(0.05, settings.lease / 4), offers.sweep))
    if decodes is not None:
        peers = _Peers(decodes, settings, keys)
        beats.append((_RENEWAL, decodes.renew))

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        context: Context = app.state.context
        # Without a secret, any client of a proxy could announce states of its own.
        if seal.secret and decodes is not None and peers is not None:
            context.transfer = decoding(seal, peers.expect, settings.on_failure)
        elif seal.secret and offers is not None:
            context.transfer = prefilling(seal, partial(_prefill_for, offers))
        tasks = [asyncio.create_task(_repeat(context.engine, *beat)) for beat in beats]
        yield
        for task in tasks:
            task.cancel()
        if peers is not None:
            await peers.close()
        worker.close()

    router = APIRouter(prefix="/split", tags=["split"], lifespan=lifespan, dependencies=[sealed(seal)])

    @router.get("/manifest", response_model=Manifest)
    async def manifest() -> Manifest:
        """The settings that determine this worker's states."""
        return worker.manifest

    @router.get("/status")
    async def counters(request: Request) -> dict[str, Any]:
        """Counters."""

        def status() -> dict[str, Any]:
            if decodes is not None:
                return {"role": "decode"} | asdict(decodes.stats)
            return {"role": "prefill", "kept": offers.kept} | asdict(offers.stats) if offers is not None else {}

        return await context_of(request).engine.call(lambda _: status())

    if offers is not None:
        _add_offering(router, offers, computes=decodes is None)
    if peers is not None:

        @router.post("/expect")
        async def expect(ticket: Ticket, request: Request) -> dict[str, bool]:
            """Make the next request for the ticket's prompt continue from the ticket's state."""
            return {"accepted": await peers.expect(ticket, request)}

    return router


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
    without a row in the table."""
    try:
        yield
    except (ManifestMismatch, SplitError) as error:
        rows = ((status, code) for kind, status, code in _STATUSES if isinstance(error, kind))
        status, code = next(rows, otherwise)
        if isinstance(error, ManifestMismatch):
            log.error("refused %s: %s", peer, error)
        raise ApiError(status, str(error), code=code, headers={"Retry-After": "1"} if status == 503 else None) from None


async def prompt_of(
    context: Context, kind: str, body: dict[str, Any], headers: Headers
) -> tuple[list[int], EngineRequest]:
    """Returns the prompt's tokens of a request with the client's headers, and the request to this engine that computes
    them, without its sampling parameters. Raises ApiError, RequestError or RequestValidationError if it is invalid, or
    has several prompts."""
    api = TEXT_APIS[kind]
    parsed = validated(api.request, body)
    context.check(parsed.model)
    own = context.of_request(parsed.model, sent_key(headers))
    request = api.converted(parsed, own.conversation)
    prompts, marks = await tokenized(own, request)
    if len(prompts) != 1:
        raise ApiError(400, "prefill workers accept only one prompt per request", param="prompt")
    return prompts[0], EngineRequest(
        f"prefill-{uuid.uuid4().hex}", {"prompt_token_ids": prompts[0]}, ONCE, request.priority,
        salt_of(request.cache_salt, headers, context.settings), marks, client=client_id(),
        lora_request=context.adapter_of(parsed.model),
    )  # fmt: skip


class PromptRequest(BaseModel):
    """A client's request, whose prompt is to be tokenized."""

    kind: Literal[tuple(TEXT_APIS)]  # type: ignore[valid-type]  # the path below `/v1/`
    body: dict[str, Any]


class PrefillRequest(PromptRequest):
    """A request to a decode worker, whose prompt is to be computed."""

    handoff: Handoff = "full"
    seconds: float = Field(600.0, gt=0)  # maximum seconds to compute the prompt; the router does not wait longer


async def _repeat(engine: AsyncEngine, seconds: float, call: Callable[[], object]) -> None:
    """Calls a function on the engine's thread every `seconds`, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        engine.tell(lambda _: call())


def _add_offering(router: APIRouter, side: PrefillSide, *, computes: bool) -> None:

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
            return await context_of(request).engine.call(lambda _: side.share(wanted))

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

    if not computes:
        return

    @router.post("/prefill", response_model=Ticket)
    async def prefill(body: PrefillRequest, request: Request) -> Ticket:
        """Compute a prompt, and hold its state until it is fetched or its lease expires."""
        context = context_of(request)
        with worker_errors("a decode worker"):
            return await until_gone(request.receive, _prefill(context, side, body, request.headers))


async def _prefill(context: Context, side: PrefillSide, body: PrefillRequest, headers: Headers) -> Ticket:
    prompt, run = await prompt_of(context, body.kind, body.body, headers)
    fed = fed_tokens(prompt, body.handoff)
    if not fed:
        return side.ticket(None, prompt, body.handoff)
    engine, id = context.engine, secrets.token_hex(16)
    last: RequestOutput | None = None
    # A lease is renewed while its prompt waits or is computed.
    beating = asyncio.create_task(_repeat(engine, side.settings.lease / 4, lambda: side.renew([id])))
    try:
        async with asyncio.timeout(body.seconds):
            owner = client_id() if has_several_keys(context.settings) else None
            export: Export = await engine.call(lambda _: side.begin(id, owner))
            marks = tuple(mark for mark in run.cache_marks if mark.position <= len(fed))
            run = replace(run, prompt={"prompt_token_ids": fed}, cache_marks=marks, export=export)
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
    adapter = None if run.lora_request is None else run.lora_request.lora_name
    counts = {"cached_tokens": last.num_cached_tokens, "written_tokens": [*last.cache_write_tokens.items()]}
    return side.ticket(export, prompt, body.handoff, adapter_name=adapter, **counts)


async def _prefill_for(side: PrefillSide, kind: str, request: Request) -> Ticket:
    """Computes the prompt of a request to `/v1/*`."""
    body = PrefillRequest(kind=kind, body=await request.json(), seconds=600.0)
    with worker_errors("a router"):
        return await _prefill(context_of(request), side, body, request.headers)


@dataclass(eq=False)
class _PeerEntry:
    """What is known of a prefill worker."""

    handshake: asyncio.Lock = field(default_factory=asyncio.Lock)
    """One handshake at a time: concurrent first requests share it, and no request waits for that of another worker."""
    peer: HttpPeer | None = None
    failed: tuple[float, str] = (-math.inf, "")  # when a handshake failed, and why


class _Peers:
    """Prefill workers after their handshake: the `_MAX_PEERS` that were used last."""

    def __init__(self, side: DecodeSide, settings: SplitSettings, keys: Sequence[str]) -> None:
        self.side, self._settings, self._keys = side, settings, keys
        self._allowed = frozenset(url.rstrip("/") for url in settings.peer)
        self._entries: dict[str, _PeerEntry] = {}

    async def get(self, url: str, manifest: str) -> HttpPeer:
        """Returns the worker at `url`. Connects again if the worker was restarted, that is, if the digest of its
        manifest is not `manifest`. Raises ApiError if it is not allowed, otherwise as `HttpPeer.connect`."""
        url = url.rstrip("/")
        if self._allowed and url not in self._allowed:
            raise ApiError(403, f"{url[:200]} is not an allowed peer", code="peer_not_allowed")
        entry = self._entries[url] = self._entries.pop(url, _PeerEntry())
        if len(self._entries) > _MAX_PEERS:
            del self._entries[next(iter(self._entries))]
        async with entry.handshake:
            if entry.peer is None or entry.peer.manifest.digest != manifest:
                since, why = entry.failed
                if time.monotonic() - since < _AGAIN:
                    raise SplitError(why)
                timeout = min(_HANDSHAKE, self._settings.fetch_timeout)
                try:
                    # The previous peer may still be in use; it closes with its last reference.
                    entry.peer = await HttpPeer.connect(
                        url, self.side.worker.manifest, seal=self._settings.seal, keys=self._keys, timeout=timeout
                    )
                except SplitError as error:
                    entry.failed = time.monotonic(), str(error)
                    raise
            return entry.peer

    async def expect(self, ticket: Ticket, request: Request) -> bool:
        """Makes the next request for the ticket's prompt continue from the ticket's state. Returns whether it will.
        Raises ApiError if the state cannot be used."""
        side = self.side
        with worker_errors(f"prefill worker {ticket.worker}", otherwise=(503, "peer_unreachable")):
            remote = side.accept(await self.get(ticket.worker, ticket.manifest), ticket)
            if remote is None:
                return False
            engine = context_of(request).engine
            if ticket.shared and not await engine.call(lambda _: side.worth_fetching(ticket)):
                return False
            await engine.call(lambda _: side.expect(ticket.prompt_token_ids, remote, ticket.lease))
        return True

    async def close(self) -> None:
        for entry in self._entries.values():
            if entry.peer is not None:
                await entry.peer.close()
