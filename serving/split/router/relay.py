"""One request's way through the router: a prefill worker, a decode worker, and others where one of them fails.

A request has one deadline, from its arrival to the beginning of its answer (or all of it, where it is not streamed);
what is left of it goes along with everything that is asked of workers. A worker that says 503 or 429 is busy: another
one is asked. So it is when a connection fails; whether the worker is down is then for its health checks to say
(`Fleet.lost_request`). Any other answer of a worker is passed on. A failure of this process (a header that cannot be
sent, no free descriptor) is never counted against a worker.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass

import httpx
from pydantic import BaseModel, ValidationError

from serving.api.http.errors import ApiError
from serving.split.http.peer import said
from serving.split.router.asked import ClientRequest
from serving.split.router.following import Following
from serving.split.router.placement import Placement, PromptMatch
from serving.split.router.workers import Fleet, Remote, choose, local_failure
from serving.split.settings import RouterSettings
from serving.split.wire import ShareRequest, Ticket

log = logging.getLogger(__name__)

_BUSY = (429, 503)
_EXPECT = 30.0
"""Seconds for telling a decode worker of a state; it can do without."""
_RELEASE = 5.0
_COMPUTED = 2.0
"""Seconds after which a prompt counts as computed where nothing says so, because its answer comes all at once."""
_RETRY = {"Retry-After": "1"}


class WorkerLost(Exception):
    """A worker has not answered: another one may. `busy`: it has, and has no room."""

    def __init__(self, why: str, *, busy: bool = False) -> None:
        super().__init__(why)
        self.busy = busy


@dataclass
class RelayStats:
    """What became of requests."""

    requests: int = 0
    split: int = 0
    """With a prompt that a prefill worker had computed."""
    shared: int = 0
    """Told of a state that another decode worker held."""
    alone: int = 0
    """Computed by a decode worker alone."""
    prefill_retries: int = 0
    decode_retries: int = 0
    late: int = 0
    """Ended by their deadline."""


@dataclass
class Answer:
    """The beginning of a decode worker's answer. `body` is to be closed."""

    status: int
    headers: dict[str, str]
    body: AsyncGenerator[bytes, None]


class Accepted(BaseModel):
    """Whether a decode worker will fetch a state."""

    accepted: bool = True


class Relay:
    """Passes requests on."""

    def __init__(self, fleet: Fleet, settings: RouterSettings, following: Following | None = None) -> None:
        self.fleet, self.settings, self.stats = fleet, settings, RelayStats()
        self.placement = Placement(fleet, settings, following)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._leaving = False

    def leave(self) -> None:
        """The router stops: what is under way ends now, and says why. May be called from any thread."""

        def end() -> None:
            self._leaving = True
            for worker in (*self.fleet.prefill, *self.fleet.decode):
                worker.end_waits()

        if self._loop is not None:
            self._loop.call_soon_threadsafe(end)

    async def answer(self, asked: ClientRequest) -> Answer:
        """The answer to a request of OpenAI's API. What fails before anything came is tried on another worker.

        Raises:
            ApiError: no worker is left, or none for the prompt where the policy asks for one; or time is up.
        """
        self.stats.requests += 1
        self._loop = asyncio.get_running_loop()
        settings, text = self.settings, asked.text
        until = time.monotonic() + (settings.first_token_timeout if asked.stream else settings.request_timeout)
        key = text[: settings.affinity].encode(errors="replace")
        wanted = asked.splittable and len(text) > settings.split_above and bool(self.fleet.prefill)
        ticket: Ticket | None = None
        found = await self.placement.look(asked.kind, asked.content, asked.body, asked.headers)
        tried, lost = list[Remote](), list[Remote]()
        try:
            while True:
                worker = self.placement.choose(self.fleet.decode, key, found, without=tried, counts=not tried)
                if worker is None:
                    raise _no_worker("decode", self.fleet.decode, lost)
                tried.append(worker)
                if wanted and ticket is None:
                    ticket = await self._prefill(asked, key, found, worker, until)
                if ticket is None:
                    ticket = await self._share(worker, found, asked, until)
                try:
                    split = ticket is not None and await self._expect(worker, ticket, asked, until)
                    left = found.to_compute(worker)
                    if ticket is not None and split:
                        left = max(0, found.tokens - ticket.position)
                    answer = await self._decode(worker, asked, left, until)
                    if ticket is not None and split and answer.status != 200:
                        await self._release(ticket)  # refused: no worker will fetch it
                    if ticket is not None and ticket.shared:
                        self.stats.shared += split
                        split = False
                    self.stats.split += split
                    self.stats.alone += not split
                    return answer
                except WorkerLost as error:
                    self.stats.decode_retries += 1
                    if not error.busy:
                        lost.append(worker)
                        self.fleet.lost_request(worker, str(error))
        except BaseException:
            if ticket is not None:
                await self._release(ticket)
            raise

    async def ask(self, path: str, asked: ClientRequest) -> httpx.Response:
        """Any decode worker's answer to something small.

        Raises:
            ApiError: none has one.
        """
        until = time.monotonic() + self.settings.first_token_timeout
        tried, lost = list[Remote](), list[Remote]()
        while (worker := choose(self.fleet.decode, b"", slack=self.settings.slack, without=tried)) is not None:
            tried.append(worker)
            method = "POST" if asked.content else "GET"
            try:
                async with worker.attended(until - time.monotonic()):
                    found = await self.fleet.client.request(
                        method, worker.url + path, content=asked.content, headers=_as_json(asked.headers)
                    )
                if found.status_code not in _BUSY:
                    return found
            except TimeoutError:
                self._check_time(worker, until)
                lost.append(worker)
            except httpx.HTTPError as error:
                self._lost(worker, error)
                lost.append(worker)
        raise _no_worker("decode", self.fleet.decode, lost)

    async def _prefill(
        self, asked: ClientRequest, key: bytes, found: PromptMatch, decode: Remote, until: float
    ) -> Ticket | None:
        """A ticket from the first prefill worker that has one; None if a decode worker is to do without.

        Raises:
            ApiError: no worker is left and the policy is to fail, or time is up.
        """
        settings, fleet = self.settings, self.fleet
        tried = [one for one in fleet.prefill if (one.url, decode.url) in fleet.mismatched]
        lost = [*tried]
        first = True
        while (worker := self.placement.choose(fleet.prefill, key, found, without=tried, counts=first)) is not None:
            tried.append(worker)
            first, left = False, until - time.monotonic()
            head = {"kind": asked.kind, "handoff": settings.handoff, "seconds": max(0.001, left)}
            message = json.dumps(head).encode()[:-1] + b', "body": ' + asked.content + b"}"
            try:
                with worker.busy(), worker.computing(found.to_compute(worker)):
                    async with worker.attended(left):
                        answer = await self._post(worker.url, "/split/prefill", message, asked.headers)
                if answer.status_code == 200:
                    ticket = Ticket.model_validate_json(answer.content)
                    return ticket if ticket.position else None
                if answer.status_code < 500 and answer.status_code not in _BUSY:
                    # The request is wrong, or too long for this worker: the decode worker has the last word.
                    return None
                log.warning("prefill worker %s: %s", worker.url, said(answer.status_code, answer.content))
            except TimeoutError:
                self._check_time(worker, until)
                lost.append(worker)
            except (httpx.HTTPError, ValidationError) as error:
                self._lost(worker, error)
                lost.append(worker)
            self.stats.prefill_retries += 1
        if settings.on_failure == "fail":
            raise _no_worker("prefill", fleet.prefill, lost)
        return None

    async def _share(self, worker: Remote, found: PromptMatch, asked: ClientRequest, until: float) -> Ticket | None:
        """A ticket for a state that another worker holds; None if none does, or does not answer soon."""
        lender = self.placement.lender(worker, found)
        if lender is None or found.prompt is None or not asked.skippable:
            return None
        own, left = found.states.get(worker), min(until - time.monotonic(), self.settings.share_timeout)
        share = ShareRequest(
            tokens=found.prompt.tokens, salt=found.prompt.salt, beyond=own.position if own is not None else 0
        )
        try:
            async with lender.attended(left):
                message = share.model_dump_json().encode()
                answer = await self._post(lender.url, "/split/share", message, asked.headers)
            if answer.status_code == 200:
                ticket = Ticket.model_validate_json(answer.content)
                if ticket.shared and ticket.prompt_token_ids == found.prompt.tokens:
                    return ticket
            log.debug("%s does not share: status %d", lender.url, answer.status_code)
        except (TimeoutError, httpx.HTTPError, ValidationError) as error:
            log.debug("%s does not share: %s", lender.url, error or type(error).__name__)
        return None

    async def _expect(self, worker: Remote, ticket: Ticket, asked: ClientRequest, until: float) -> bool:
        """Tell a decode worker of the state; whether it can use it. If not, it does without.

        Raises:
            WorkerLost: it cannot be reached.
            ApiError: it may not do without, or time is up.
        """
        left = until - time.monotonic()
        if ticket.shared:
            left = min(left, self.settings.share_timeout)
        message = ticket.model_copy(update={"patience": max(0.001, left)}).model_dump_json().encode()
        why = f"it has not answered in {_EXPECT:g} s"
        try:
            async with worker.attended(min(left, _EXPECT)):
                found = await self._post(worker.url, "/split/expect", message, asked.headers)
            if found.status_code == 200:
                if not ticket.shared or Accepted.model_validate_json(found.content).accepted:
                    return True
                await self._release(ticket)  # computing is expected to be sooner
                return False
            why = said(found.status_code, found.content)
        except ValidationError:
            why = "its answer makes no sense"
        except TimeoutError:
            self._check_time(worker, until)
            if not worker.up:
                raise WorkerLost("it has gone") from None
        except httpx.HTTPError as error:
            _check_local(error)
            raise WorkerLost(_why(error)) from None
        log.warning("decode worker %s: %s", worker.url, why)
        if self.settings.on_failure == "fail" and not ticket.shared:
            raise ApiError(503, why, code="state_not_fetched", headers=_RETRY)
        await self._release(ticket)
        return False

    async def _decode(self, worker: Remote, asked: ClientRequest, tokens: int, until: float) -> Answer:
        """The beginning of the answer, up to its first piece. `tokens` of the prompt are to be computed there.

        Raises:
            WorkerLost: there is none.
            ApiError: time is up.
        """
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(worker.busy())
                request = self.fleet.client.build_request(
                    "POST", f"{worker.url}/v1/{asked.kind}", content=asked.content, headers=_as_json(asked.headers)
                )
                with worker.computing(tokens, math.inf if asked.stream else _COMPUTED):
                    async with worker.attended(until - time.monotonic()):
                        found = await self.fleet.client.send(request, stream=True)
                        stack.push_async_callback(found.aclose)
                        if found.status_code in _BUSY:
                            raise WorkerLost(f"it answers {found.status_code}", busy=True)
                        pieces = found.aiter_raw()
                        first = [piece] if asked.stream and (piece := await anext(pieces, b"")) else []
                        if not asked.stream:
                            # All of it: what breaks off half way can still be asked of another.
                            first = [piece async for piece in pieces]
            except TimeoutError:
                self._check_time(worker, until)
                raise WorkerLost("it has gone") from None
            except httpx.HTTPError as error:
                _check_local(error)
                raise WorkerLost(_why(error)) from None
            held = stack.pop_all()
        passed = ("content-type", "retry-after", "cache-control", "x-request-id")
        answered = {name: value for name, value in found.headers.items() if name in passed}

        async def rest() -> AsyncGenerator[bytes, None]:
            async with held:
                for piece in first:
                    yield piece
                while asked.stream:
                    try:
                        async with worker.attended(self.settings.stall_timeout, streaming=True):
                            piece = await anext(pieces, b"")
                    except TimeoutError:
                        raise (_leaving() if self._leaving else _broken_off()) from None
                    except httpx.HTTPError as error:
                        self.fleet.lost_request(worker, _why(error))
                        raise _broken_off() from None
                    if not piece:
                        return
                    yield piece

        return Answer(found.status_code, answered, rest())

    def _lost(self, worker: Remote, error: Exception) -> None:
        """A request to a worker has failed without an answer.

        Raises:
            ApiError: the failure is this router's own.
        """
        _check_local(error)
        self.fleet.lost_request(worker, _why(error))

    def _check_time(self, worker: Remote, until: float) -> None:
        """After a timeout: if it was the request's own, or all of them end, that was it.

        Raises:
            ApiError: time is up.
        """
        if self._leaving:
            raise _leaving()
        if time.monotonic() >= until:
            self.stats.late += 1
            raise ApiError(
                503, f"no answer in time (the last to be asked was {worker.role} worker {worker.url})", code="too_late",
                headers=_RETRY,
            )  # fmt: skip

    async def _post(self, url: str, path: str, message: bytes, headers: dict[str, str]) -> httpx.Response:
        fleet = self.fleet
        return await fleet.client.post(url + path, content=message, headers=_as_json(headers), auth=fleet.auth)

    async def _release(self, ticket: Ticket) -> None:
        message = json.dumps({"id": ticket.id, "wanted": False}).encode()
        try:
            # Not "attended": whose state it is may be down, and its lease will then run out.
            found = self._post(ticket.worker, "/split/release", message, self.fleet.headers)
            await asyncio.wait_for(found, _RELEASE)
        except (TimeoutError, httpx.HTTPError) as error:
            log.debug("a lease will have to run out: %s", error)


def _as_json(headers: dict[str, str]) -> dict[str, str]:
    return headers | {"content-type": "application/json"}


def _why(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _check_local(error: Exception) -> None:
    """
    Raises:
        ApiError: an error of the HTTP client was raised on this machine, and says nothing of the worker.
    """
    why = local_failure(error)
    if why is None:
        return
    if isinstance(error, httpx.LocalProtocolError):
        raise ApiError(400, f"the request cannot be forwarded to a worker: {why}") from None
    raise ApiError(503, f"the router cannot open a connection: {why}", code="busy", headers=_RETRY) from None


def _no_worker(role: str, workers: list[Remote], lost: list[Remote]) -> ApiError:
    """`lost`: those that have not answered; the others that are up have no room."""
    busy = any(worker.up and worker not in lost for worker in workers)
    message = f"all {role} workers are busy" if busy else f"no {role} worker is available"
    return ApiError(503, message, code="no_worker", headers=_RETRY)


def _leaving() -> ApiError:
    return ApiError(503, "the router has been shut down", code="engine_stopped", headers=_RETRY)


def _broken_off() -> ApiError:
    return ApiError(502, "the decode worker has gone in the middle of the answer", code="broken_off")
