"""One request's way through the router: a prefill worker, a decode worker, and others where one of them fails."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx
from pydantic import ValidationError

from serving.api.http.errors import ApiError
from serving.disagg.http.peer import said
from serving.disagg.router.workers import Fleet, Remote, choose
from serving.disagg.settings import RouterSettings
from serving.disagg.wire import Ticket

log = logging.getLogger(__name__)


class WorkerLost(Exception):
    """A decode worker has gone before anything of its answer was passed on."""


@dataclass
class RelayStats:
    """What became of requests."""

    requests: int = 0
    split: int = 0
    """With a prompt that a prefill worker had computed."""
    alone: int = 0
    """Computed by a decode worker alone."""
    prefill_retries: int = 0
    decode_retries: int = 0


@dataclass
class Answer:
    """The beginning of a decode worker's answer. `body` is to be closed."""

    status: int
    headers: dict[str, str]
    body: AsyncGenerator[bytes, None]


class Relay:
    """Passes requests on."""

    def __init__(self, fleet: Fleet, settings: RouterSettings) -> None:
        self.fleet, self.settings, self.stats = fleet, settings, RelayStats()

    async def answer(self, kind: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The answer to a request of OpenAI's API. What fails before anything came is tried on another worker.

        Raises:
            ApiError: no worker is left, or none for the prompt where the policy asks for one.
        """
        self.stats.requests += 1
        settings, text = self.settings, prompt_text(kind, body)
        key = text[: settings.affinity].encode()
        ticket: Ticket | None = None
        wanted = splittable(kind, body) and len(text) > settings.split_above and bool(self.fleet.prefill)
        tried: list[Remote] = []
        while True:
            worker = choose(self.fleet.decode, key, slack=settings.slack, without=tried)
            if worker is None:
                if ticket is not None:
                    await self._release(ticket)
                raise ApiError(503, "no decode worker is to be had", code="no_worker", headers={"Retry-After": "1"})
            tried.append(worker)
            if wanted and ticket is None:
                ticket = await self._prefill(kind, body, key, headers, worker)
            try:
                split = ticket is not None and await self._expect(worker, ticket, headers)
                answer = await self._decode(worker, kind, body, headers)
                self.stats.split += split
                self.stats.alone += not split
                return answer
            except WorkerLost as error:
                self.stats.decode_retries += 1
                worker.failed(str(error))
            except BaseException:
                if ticket is not None:
                    await self._release(ticket)
                raise

    async def _prefill(
        self, kind: str, body: dict[str, Any], key: bytes, headers: dict[str, str], decode: Remote
    ) -> Ticket | None:
        """A ticket from the first prefill worker that has one; None if a decode worker is to do without.

        Raises:
            ApiError: no worker is left and the policy is to fail.
        """
        settings, fleet = self.settings, self.fleet
        tried = [one for one in fleet.prefill if (one.url, decode.url) in fleet.mismatched]
        message = {"kind": kind, "body": body, "handoff": settings.handoff}
        while (worker := choose(fleet.prefill, key, slack=settings.slack, without=tried)) is not None:
            tried.append(worker)
            try:
                with worker.busy():
                    found = await fleet.client.post(f"{worker.url}/split/prefill", json=message, headers=headers)
                if found.status_code == 200:
                    ticket = Ticket.model_validate(found.json())
                    return ticket if ticket.position else None
                if found.status_code < 500:
                    # The request is wrong, or too long for this worker: the decode worker has the last word.
                    return None
                log.warning("prefill worker %s: %s", worker.url, said(found))
            except (httpx.HTTPError, ValidationError, ValueError) as error:
                worker.failed(str(error) or type(error).__name__)
            self.stats.prefill_retries += 1
        if settings.on_failure == "fail":
            raise ApiError(503, "no prefill worker is to be had", code="no_worker", headers={"Retry-After": "1"})
        return None

    async def _expect(self, worker: Remote, ticket: Ticket, headers: dict[str, str]) -> bool:
        """Tell a decode worker of the state; whether it can use it. If not, it does without.

        Raises:
            WorkerLost: it does not answer.
            ApiError: it may not do without.
        """
        try:
            found = await self.fleet.client.post(
                f"{worker.url}/split/expect", json=ticket.model_dump(), headers=headers, timeout=30.0
            )
        except httpx.HTTPError as error:
            raise WorkerLost(str(error) or type(error).__name__) from None
        if found.status_code == 200:
            return True
        if found.status_code == 503:
            raise WorkerLost("it answers 503")
        log.warning("decode worker %s: %s", worker.url, said(found))
        if self.settings.on_failure == "fail":
            raise ApiError(502, said(found), code="state_not_fetched")
        await self._release(ticket)
        return False

    async def _decode(self, worker: Remote, kind: str, body: dict[str, Any], headers: dict[str, str]) -> Answer:
        """The beginning of the answer, up to its first piece.

        Raises:
            WorkerLost: there is none.
        """
        async with AsyncExitStack() as stack:
            try:
                stack.enter_context(worker.busy())
                client = self.fleet.client
                found = await stack.enter_async_context(
                    client.stream("POST", f"{worker.url}/v1/{kind}", json=body, headers=headers)
                )
                if found.status_code == 503:
                    raise WorkerLost("it answers 503")
                pieces = found.aiter_raw()
                first = [piece] if body.get("stream") and (piece := await anext(pieces, b"")) else []
                if not body.get("stream"):
                    # All of it: what breaks off half way can still be asked of another.
                    first = [piece async for piece in pieces]
            except httpx.HTTPError as error:
                raise WorkerLost(str(error) or type(error).__name__) from None
            held = stack.pop_all()
        passed = ("content-type", "retry-after", "cache-control", "x-request-id")
        answered = {name: value for name, value in found.headers.items() if name in passed}

        async def rest() -> AsyncGenerator[bytes, None]:
            async with held:
                for piece in first:
                    yield piece
                try:
                    if body.get("stream"):
                        async for piece in pieces:
                            yield piece
                except httpx.HTTPError as error:
                    worker.failed(str(error) or type(error).__name__)
                    raise ApiError(502, "the decode worker has gone in the middle of the answer") from None

        return Answer(found.status_code, answered, rest())

    async def _release(self, ticket: Ticket) -> None:
        try:
            await self.fleet.client.post(
                f"{ticket.worker}/split/release",
                json={"id": ticket.id, "wanted": False},
                headers=self.fleet.headers,
                timeout=5.0,
            )
        except httpx.HTTPError as error:
            log.debug("a lease will have to run out: %s", error)


def splittable(kind: str, body: dict[str, Any]) -> bool:
    """Whether a prefill worker can do the prompt: there is one, and nothing is asked of its tokens."""
    if body.get("prompt_logprobs") is not None or (body.get("echo") and body.get("logprobs") is not None):
        return False
    if kind == "chat/completions":
        return True
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        return bool(prompt) and isinstance(prompt[0], int)
    return isinstance(prompt, str)


def prompt_text(kind: str, body: dict[str, Any]) -> str:
    """What a prompt begins with, for choosing workers: equal beginnings of prompts are equal beginnings of it."""
    given = body.get("messages") if kind == "chat/completions" else body.get("prompt")
    return given if isinstance(given, str) else json.dumps(given)
