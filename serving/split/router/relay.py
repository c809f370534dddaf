"""Forwards a request to a prefill worker and a decode worker, and retries on other workers.

A request has one deadline, from its arrival to the first piece of the response (or to all of it, without streaming);
messages to workers contain the time left. If a worker answers 503 or 429, or a connection fails, the router tries
another worker; health checks decide whether the worker is down (`Fleet.lost_request`). It forwards any other answer.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass

import httpx
from prometheus_client.core import Metric
from pydantic import BaseModel, ValidationError

from checkpoints.errors import one_line
from serving.api.http.errors import ApiError
from serving.api.metrics import Families, Labels
from serving.core.stats import exported
from serving.split.http.peer import error_of
from serving.split.router.event_followers import EventFollowers
from serving.split.router.placement import ClientRequest, Placement, PlacementStats, PromptMatch
from serving.split.router.workers import Fleet, Remote, choose, local_failure
from serving.split.wire import ShareRequest, Ticket

log = logging.getLogger(__name__)

_BUSY = (429, 503)
_EXPECT = 30.0  # seconds to wait when announcing a state to a decode worker, which can compute without it
_RELEASE = 5.0
_COMPUTED = 2.0  # seconds after which the prompt of a response without streaming counts as computed
_RETRY = {"Retry-After": "1"}


class WorkerLost(Exception):
    """A worker did not answer, so another one is tried."""


class WorkerSilent(WorkerLost):
    """A worker that is up did not answer in time."""


class WorkerBusy(WorkerLost):
    """A worker answered that it has no room."""


@dataclass
class RelayStats:
    """Counters of requests."""

    requests: int = exported("router_requests", "Forwarded requests.")
    split: int = exported("router_split", "Requests whose prompt a prefill worker computed.")
    shared: int = exported("router_shared", "Requests whose worker was offered another worker's state.")
    alone: int = exported("router_alone", "Requests that a decode worker computed alone.")
    prefill_retries: int = exported("router_prefill_retries", "Retries on another prefill worker.")
    decode_retries: int = exported("router_decode_retries", "Retries on another decode worker.")
    late: int = exported("router_late", "Requests that exceeded their deadline.")


@dataclass
class Answer:
    """The start of a decode worker's response. The caller closes `body`."""

    status: int
    headers: dict[str, str]
    body: AsyncGenerator[bytes, None]


class Accepted(BaseModel):
    """Whether a decode worker will fetch a state."""

    accepted: bool = True


class Relay:
    """Forwards requests."""

    def __init__(self, fleet: Fleet, following: EventFollowers | None = None) -> None:
        self.fleet, self.settings, self.stats = fleet, fleet.settings, RelayStats()
        self.placement = Placement(fleet, following)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False

    def leave(self) -> None:
        """Shuts down: end all running requests with an error. May be called from any thread."""

        def end() -> None:
            self._leaving = True
            for worker in (*self.fleet.prefill, *self.fleet.decode):
                worker.end_waits()

        if self._loop is not None:
            self._loop.call_soon_threadsafe(end)

    async def answer(self, asked: ClientRequest) -> Answer:
        """Returns the response to a client's request. Failures before the first piece are retried on another worker.

        Raises:
            ApiError: no decode worker is left, no prefill worker is left and the policy is to fail, or the deadline is
                over.
        """
        self.stats.requests += 1
        self._loop = asyncio.get_running_loop()
        settings, text = self.settings, asked.text
        until = time.monotonic() + (settings.first_token_timeout if asked.stream else settings.request_timeout)
        key = text[: settings.affinity].encode(errors="replace")
        prefills = asked.num_continued == 1 and len(text) > settings.split_above and bool(self.fleet.prefill)
        ticket: Ticket | None = None
        match = await self.placement.look(asked)
        tried, lost = list[Remote](), list[Remote]()
        try:
            while True:
                worker = self.placement.choose(self.fleet.decode, key, match, without=tried, counts=not tried)
                if worker is None:
                    raise _no_worker("decode", self.fleet.decode, lost)
                tried.append(worker)
                if prefills and ticket is None:
                    ticket = await self._prefill(asked, key, match, worker, until)
                if ticket is None:
                    ticket = await self._share(worker, match, asked, until)
                try:
                    split = ticket is not None and await self._expect(worker, ticket, asked, until)
                    left = match.to_compute(worker)
                    if ticket is not None and split:
                        left = max(0, match.tokens - ticket.position)
                    answer = await self._decode(worker, asked, left, until)
                    if ticket is not None and split and answer.status != 200:
                        await self._release(ticket)  # the request was refused, so no worker will fetch the state
                    if ticket is not None and ticket.shared:
                        self.stats.shared += split
                        split = False
                    self.stats.split += split
                    self.stats.alone += not split
                    return answer
                except WorkerBusy:
                    self.stats.decode_retries += 1
                except WorkerLost as error:
                    self.stats.decode_retries += 1
                    lost.append(worker)
                    self.fleet.lost_request(worker, str(error))
        except BaseException:
            if ticket is not None:
                await self._release(ticket)
            raise

    async def ask(self, path: str, asked: ClientRequest) -> httpx.Response:
        """Returns any decode worker's response to a small request.

        Raises:
            ApiError: no worker answered.
        """
        until = time.monotonic() + self.settings.first_token_timeout
        tried, lost = list[Remote](), list[Remote]()
        while (worker := choose(self.fleet.decode, b"", slack=self.settings.slack, without=tried)) is not None:
            tried.append(worker)
            method = "POST" if asked.content else "GET"
            try:
                async with self._attended(worker, until):
                    answer = await self.fleet.client.request(
                        method, worker.url + path, content=asked.content, headers=asked.headers
                    )
                if answer.status_code not in _BUSY:
                    return answer
            except WorkerLost as error:
                self.fleet.lost_request(worker, str(error))
                lost.append(worker)
        raise _no_worker("decode", self.fleet.decode, lost)

    def collect(self) -> Iterator[Metric]:
        """Yields metrics in addition to those of the HTTP server: this is a collector for a Prometheus registry."""
        families, following = Families(), self.placement.following
        families.exported(RelayStats, asdict(self.stats))
        families.exported(PlacementStats, asdict(self.placement.stats))
        reported = following.states() if following is not None else {}
        for worker in (*self.fleet.prefill, *self.fleet.decode):
            labels: Labels = (("role", worker.role), ("url", worker.url))
            families.gauge("worker_up", "Whether a worker answers.", {labels: worker.up})
            families.gauge("worker_load", "Running requests of a worker.", {labels: worker.load})
            families.count("worker_failures", "Times that a worker did not answer.", {labels: worker.failures})
            if following is not None:
                text = "States that a worker reports; no value for a worker without an event stream."
                families.gauge("worker_states", text, {labels: reported[worker.url]} if worker.url in reported else {})
        yield from families.metrics()

    async def _prefill(
        self, asked: ClientRequest, key: bytes, match: PromptMatch, decode: Remote, until: float
    ) -> Ticket | None:
        """Returns a ticket from the first prefill worker that issues one; None: the decode worker does it all."""
        settings, fleet = self.settings, self.fleet
        tried = [one for one in fleet.prefill if (one.url, decode.url) in fleet.mismatched]
        lost = [*tried]
        first = True
        while (worker := self.placement.choose(fleet.prefill, key, match, without=tried, counts=first)) is not None:
            tried.append(worker)
            first, left = False, until - time.monotonic()
            message = asked.message(kind=asked.kind, handoff=settings.handoff, seconds=max(0.001, left))
            try:
                with worker.busy(), worker.computing(match.to_compute(worker)):
                    answer = await self._post(worker, "prefill", message, asked, until)
                if answer.status_code == 200:
                    ticket = Ticket.model_validate_json(answer.content)
                    return ticket if ticket.position else None
                # It may be invalid, too long for this worker, or name an adapter that this worker does not have: then
                # the decode worker decides.
                refused = answer.status_code < 500 and answer.status_code not in _BUSY
                why, level = error_of(answer.status_code, answer.content), logging.INFO if refused else logging.WARNING
                log.log(level, "prefill worker %s: %s", worker.url, why.message)
                if refused:
                    return None
            except (WorkerLost, ValidationError) as error:
                fleet.lost_request(worker, one_line(error))
                lost.append(worker)
            self.stats.prefill_retries += 1
        if settings.on_failure == "fail":
            raise _no_worker("prefill", fleet.prefill, lost)
        return None

    async def _share(self, worker: Remote, match: PromptMatch, asked: ClientRequest, until: float) -> Ticket | None:
        """Returns a ticket for another decode worker's state; None if no worker offers one in time."""
        owner = self.placement.state_owner(worker, match)
        if owner is None or match.prompt is None or not asked.num_continued:
            return None
        own = match.states.get(worker)
        share = ShareRequest(**dict(match.prompt), beyond=own.position if own is not None else 0)
        try:
            message = share.model_dump_json().encode()
            answer = await self._post(owner, "share", message, asked, until, self.settings.share_timeout)
            if answer.status_code == 200:
                ticket = Ticket.model_validate_json(answer.content)
                if ticket.shared and ticket.prompt_token_ids == match.prompt.tokens:
                    return ticket
            log.debug("%s does not share: status %d", owner.url, answer.status_code)
        except (WorkerLost, ApiError, ValidationError) as error:
            log.debug("%s does not share: %s", owner.url, error)
        return None

    async def _expect(self, worker: Remote, ticket: Ticket, asked: ClientRequest, until: float) -> bool:
        """Announces a state to a decode worker. Returns whether the worker will use it."""
        most = self.settings.share_timeout if ticket.shared else _EXPECT
        left = min(until - time.monotonic(), self.settings.share_timeout if ticket.shared else math.inf)
        message = ticket.model_copy(update={"patience": max(0.001, left)}).model_dump_json().encode()
        try:
            reply = await self._post(worker, "expect", message, asked, until, most)
            if reply.status_code == 200:
                if not ticket.shared or Accepted.model_validate_json(reply.content).accepted:
                    return True
                await self._release(ticket)  # computing is expected to be faster
                return False
            why = error_of(reply.status_code, reply.content).message
        except ValidationError:
            why = "invalid answer"
        except WorkerSilent as error:
            why = str(error)
        log.warning("decode worker %s: %s", worker.url, why)
        if self.settings.on_failure == "fail" and not ticket.shared:
            raise ApiError(503, why, code="state_not_fetched", headers=_RETRY)
        await self._release(ticket)
        return False

    async def _decode(self, worker: Remote, asked: ClientRequest, tokens: int, until: float) -> Answer:
        """Returns the response up to its first piece. `tokens`: number of prompt tokens that the worker computes."""
        async with AsyncExitStack() as stack:
            stack.enter_context(worker.busy())
            request = self.fleet.client.build_request(
                "POST", f"{worker.url}/v1/{asked.kind}", content=asked.content, headers=asked.headers
            )
            with worker.computing(tokens, math.inf if asked.stream else _COMPUTED):
                async with self._attended(worker, until):
                    reply = await self.fleet.client.send(request, stream=True)
                    stack.push_async_callback(reply.aclose)
                    if reply.status_code in _BUSY:
                        raise WorkerBusy(f"status {reply.status_code}")
                    pieces = reply.aiter_raw()
                    first = [piece] if asked.stream and (piece := await anext(pieces, b"")) else []
                    if not asked.stream:
                        # Read all of it, so that another worker can be tried if the connection breaks.
                        first = [piece async for piece in pieces]
            open_reply = stack.pop_all()
        names = ("content-type", "retry-after", "cache-control", "x-request-id")
        headers = {name: value for name, value in reply.headers.items() if name in names}

        async def rest() -> AsyncGenerator[bytes, None]:
            async with open_reply:
                for piece in first:
                    yield piece
                while asked.stream:
                    try:
                        async with worker.attended(self.settings.stall_timeout, streaming=True):
                            piece = await anext(pieces, b"")
                    except TimeoutError:
                        raise (_leaving() if self._leaving else _broken_off()) from None
                    except httpx.HTTPError as error:
                        self.fleet.lost_request(worker, one_line(error))
                        raise _broken_off() from None
                    if not piece:
                        return
                    yield piece

        return Answer(reply.status_code, headers, rest())

    @asynccontextmanager
    async def _attended(self, worker: Remote, until: float, seconds: float = math.inf) -> AsyncGenerator[None, None]:
        """Waits for a worker's answer until a request's deadline, and for at most `seconds`. Raises WorkerLost without
        an answer, and ApiError if the deadline is over, the router shuts down, or the failure is on this machine."""
        try:
            async with worker.attended(min(until - time.monotonic(), seconds)):
                yield
        except TimeoutError:
            if self._leaving:
                raise _leaving() from None
            if time.monotonic() >= until:
                self.stats.late += 1
                why = f"no answer before the deadline (last tried: {worker.role} worker {worker.url})"
                raise ApiError(503, why, code="too_late", headers=_RETRY) from None
            if not worker.up:
                raise WorkerLost("it is down") from None
            raise WorkerSilent(f"no answer within {seconds:g} s") from None
        except httpx.HTTPError as error:
            if isinstance(error, httpx.LocalProtocolError):
                raise ApiError(400, f"the request cannot be forwarded to a worker: {error}") from None
            if (cause := local_failure(error)) is not None:
                why = f"the router cannot open a connection: {cause}"
                raise ApiError(503, why, code="busy", headers=_RETRY) from None
            raise WorkerLost(one_line(error)) from None

    async def _post(
        self, worker: Remote, name: str, message: bytes, asked: ClientRequest, until: float, seconds: float = math.inf
    ) -> httpx.Response:
        """Returns a worker's answer to a message of the fleet; see `_attended`."""
        async with self._attended(worker, until, seconds):
            return await self._send(worker.url, name, message, asked.headers)

    async def _send(self, url: str, name: str, message: bytes, headers: dict[str, str]) -> httpx.Response:
        client, auth = self.fleet.client, self.fleet.auth
        return await client.post(f"{url}/split/{name}", content=message, headers=headers, auth=auth)

    async def _release(self, ticket: Ticket) -> None:
        message = json.dumps({"id": ticket.id, "wanted": False}).encode()
        try:
            # Not `attended`: the state's worker may be down, and then its lease expires.
            await asyncio.wait_for(self._send(ticket.worker, "release", message, self.fleet.headers), _RELEASE)
        except (TimeoutError, httpx.HTTPError) as error:
            log.debug("could not release a state, its lease will expire: %s", error)


def _no_worker(role: str, workers: list[Remote], lost: list[Remote]) -> ApiError:
    """Returns the error if no worker is left. `lost`: workers that did not answer; the others that are up are busy."""
    busy = any(worker.up and worker not in lost for worker in workers)
    message = f"all {role} workers are busy" if busy else f"no {role} worker is available"
    return ApiError(503, message, code="no_worker", headers=_RETRY)


def _leaving() -> ApiError:
    return ApiError(503, "the router is shutting down", code="engine_stopped", headers=_RETRY)


def _broken_off() -> ApiError:
    return ApiError(502, "the decode worker failed during the response", code="broken_off")
