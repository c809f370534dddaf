"""The workers that a router knows: who is up, how busy each is, and which one a prompt should go to."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from serving.api.http.errors import TOO_MANY_CONNECTIONS
from serving.core.placing import Workload
from serving.split.http.peer import error_code
from serving.split.http.sealed import SealAuth
from serving.split.manifest import Manifest, ManifestMismatch, check
from serving.split.seal import Seal

log = logging.getLogger(__name__)

_MISSES = 3
"""Health checks without an answer, after which a worker is down."""
_LOST = 8
"""Requests lost without a health check answered in between, after which a worker is down."""
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def local_failure(error: BaseException | None) -> str | None:
    """What is wrong on this machine, if an error of the HTTP client was raised here and says nothing of the worker:
    a message that it refuses to send, or no descriptor, port or memory for a connection. None otherwise."""
    if isinstance(error, httpx.LocalProtocolError | httpx.UnsupportedProtocol):
        return str(error)
    waiting, seen = [error], set[int]()
    while waiting:
        each = waiting.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, OSError) and each.errno in _EXHAUSTED:
            return os.strerror(each.errno).lower()
        waiting += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            waiting += each.exceptions
    return None


@dataclass(eq=False)
class Remote:
    """One worker, as the router sees it."""

    url: str
    role: str
    up: bool = True
    """Taken for granted until something fails: a router may start before its workers."""
    load: int = 0
    """Requests under way by this router."""
    requests: int = 0
    failures: int = 0
    missed: int = 0
    """Health checks in a row that it has not answered."""
    lost: int = 0
    """Requests lost since the last health check that it has answered."""
    manifest: Manifest | None = None
    work: Workload = field(default_factory=Workload)
    """Prompt tokens that this router has given it."""
    _waits: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Since when each wait lasts, on the event loop's clock; minus infinity for a request that can be retried."""

    @asynccontextmanager
    async def attended(self, seconds: float, *, streaming: bool = False) -> AsyncIterator[None]:
        """Around every wait for this worker. `streaming`: for the next piece of a stream, which cannot be retried.

        Raises:
            TimeoutError: it took longer, or the worker is down and this is not a stream that still flows.
        """
        async with asyncio.timeout(max(0.0, seconds) if self.up or streaming else 0.0) as scope:
            self._waits[scope] = asyncio.get_running_loop().time() if streaming else -math.inf
            try:
                yield
            finally:
                del self._waits[scope]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts one request."""
        self.load += 1
        self.requests += 1
        try:
            yield
        finally:
            self.load -= 1

    @contextmanager
    def computing(self, tokens: int, seconds: float = math.inf) -> Iterator[None]:
        """While it computes so many prompt tokens; it is believed to be done after so many seconds at the latest."""
        left = [tokens]

        def done() -> None:
            if left:
                self.work.computed(left.pop())

        self.work.given(tokens, time.monotonic())
        late = asyncio.get_running_loop().call_later(seconds, done) if math.isfinite(seconds) else None
        try:
            yield
        finally:
            done()
            if late is not None:
                late.cancel()

    def mark_down(self, why: str, stalled_after: float = 5.0) -> None:
        """Send it no request until it answers a health check. Requests that can be retried end now; streams end once
        they have been silent for `stalled_after` seconds."""
        if self.up:
            log.warning("%s worker %s is down: %s", self.role, self.url, why)
        self.up = False
        self.end_waits(stalled_after)

    def end_waits(self, longer_than: float = -math.inf) -> None:
        """End all waits that last longer than so many seconds, as if their time were up."""
        now = asyncio.get_running_loop().time()
        for scope, since in self._waits.items():
            if now - since > longer_than and not scope.expired():
                scope.reschedule(now)


def choose(workers: Iterable[Remote], key: bytes, *, slack: int, without: Iterable[Remote] = ()) -> Remote | None:
    """The worker for a prompt: always the same for the same key, unless that one is too busy or down.

    Rendezvous hashing: when a worker comes or goes, only its own keys move. With a bound on the load (Mirrokni et al.,
    2018): a worker may have `slack` requests more than the least busy one.
    """
    tried = list(without)
    up = [worker for worker in workers if worker.up and worker not in tried]
    if not up:
        return None
    most = min(worker.load for worker in up) + slack
    return max((worker for worker in up if worker.load <= most), key=lambda worker: _weight(worker.url, key))


def _weight(url: str, key: bytes) -> bytes:
    return hashlib.blake2b(key, key=url.encode()[:64], digest_size=8).digest()


@dataclass
class Fleet:
    """All workers of a router, and the looks at their health."""

    prefill: list[Remote]
    decode: list[Remote]
    client: httpx.AsyncClient
    headers: dict[str, str] = field(default_factory=dict)
    """Of what the router asks by itself."""
    seal: Seal = field(default_factory=Seal)
    """Of the fleet."""
    auth: httpx.Auth = field(init=False)
    """Seals what the router sends to workers."""
    mismatched: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of (prefill, decode) that cannot exchange states, and why."""
    max_worker_requests: int = 1 << 30
    """Requests under way at one worker; a worker with as many gets no more."""
    patience: float = 5.0
    """Seconds for the answer to a health check."""
    _checks: dict[Remote, asyncio.Task[None]] = field(default_factory=dict)
    """Health checks under way because a request was lost."""

    def __post_init__(self) -> None:
        self.auth = SealAuth(self.seal)

    @classmethod
    def of(
        cls,
        prefill: Iterable[str],
        decode: Iterable[str],
        client: httpx.AsyncClient,
        headers: dict[str, str] | None = None,
        seal: Seal | None = None,
    ) -> Fleet:
        """From URLs."""
        return cls(
            [Remote(url.rstrip("/"), "prefill") for url in prefill],
            [Remote(url.rstrip("/"), "decode") for url in decode],
            client,
            headers or {},
            seal or Seal(),
        )

    def follow(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """Workers have come or gone. Requests that the gone ones have go on as they can."""
        for role, urls, known in (("prefill", prefill, self.prefill), ("decode", decode, self.decode)):
            wanted = {url.rstrip("/") for url in urls}
            known[:] = [worker for worker in known if worker.url in wanted]
            known += [Remote(url, role) for url in sorted(wanted - {worker.url for worker in known})]

    def full(self, workers: Iterable[Remote]) -> list[Remote]:
        """The workers that have as many requests as they may."""
        return [worker for worker in workers if worker.load >= self.max_worker_requests]

    async def watch(self, interval: float, patience: float = 5.0) -> None:
        """Check every worker's health again and again; a check waits `patience` seconds for its answer."""
        self.patience = patience
        while True:
            await asyncio.gather(*(self._look(worker) for worker in (*self.prefill, *self.decode)))
            self._compare()
            await asyncio.sleep(interval)

    def lost_request(self, worker: Remote, why: str) -> None:
        """A request to a worker has failed without an answer. Any client may have caused that, so a health check made
        now decides whether the worker is down; or `_LOST` such requests before it has answered one."""
        worker.failures += 1
        if not worker.up:
            return
        worker.lost += 1
        log.debug("%s worker %s has lost a request: %s", worker.role, worker.url, why)
        if worker.lost >= _LOST:
            worker.mark_down(f"{worker.lost} requests lost, the last one: {why}", self.patience)
        if worker not in self._checks:
            check = self._checks[worker] = asyncio.create_task(self._look(worker, with_manifest=False))
            check.add_done_callback(lambda _: self._checks.pop(worker, None))

    async def _look(self, worker: Remote, *, with_manifest: bool = True) -> None:
        try:
            async with asyncio.timeout(self.patience):
                answer = await self.client.get(f"{worker.url}/ready", headers=self.headers)
                up, found = answer.status_code == 200, None
                if answer.status_code == 503 and error_code(answer.content) == TOO_MANY_CONNECTIONS:
                    worker.missed = worker.lost = 0  # it answers, so it is no more down than before
                    return
                if up and with_manifest and (worker.manifest is None or not worker.up):
                    asked = f"{worker.url}/split/manifest"
                    found = await self.client.get(asked, headers=self.headers, auth=self.auth)
            if found is not None:
                worker.manifest = Manifest.model_validate(found.json()) if found.status_code == 200 else None
                if worker.manifest is None:
                    log.error("%s is not a %s worker: it answers %d", worker.url, worker.role, found.status_code)
            why, worker.missed, worker.lost = f"status {answer.status_code}", 0, 0
        except (TimeoutError, httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError) as error:
            if (local := local_failure(error)) is not None:
                log.warning("the health of %s worker %s is unknown: %s", worker.role, worker.url, local)
                return
            # A busy machine is slow to answer, and a server may close an idle connection just as it is used again.
            # Only a refused connection is a clear answer.
            worker.missed = _MISSES if isinstance(error, httpx.ConnectError) else worker.missed + 1
            up, why = worker.up and worker.missed < _MISSES, str(error) or "it does not answer"
        except (httpx.HTTPError, ValidationError, ValueError) as error:
            up, why = False, str(error) or type(error).__name__
        if up and not worker.up:
            log.info("%s worker %s is up", worker.role, worker.url)
            worker.up = True
        elif not up:
            worker.failures += worker.up
            worker.mark_down(why, self.patience)

    def _compare(self) -> None:
        """Say of each pair once if it does not fit together."""
        for one in self.prefill:
            for other in self.decode:
                if one.manifest is None or other.manifest is None:
                    continue
                pair = (one.url, other.url)
                try:
                    check(one.manifest, other.manifest)
                except ManifestMismatch as error:
                    if self.mismatched.get(pair) != str(error):
                        log.error("prefill %s and decode %s: %s", *pair, error)
                    self.mismatched[pair] = str(error)
                else:
                    self.mismatched.pop(pair, None)

    def status(self) -> dict[str, Any]:
        """Who is up, and how busy."""

        def table(workers: list[Remote]) -> list[dict[str, Any]]:
            return [
                {"url": w.url, "up": w.up, "load": w.load, "requests": w.requests, "failures": w.failures}
                for w in workers
            ]

        pairs = [{"prefill": one, "decode": other, "why": why} for (one, other), why in self.mismatched.items()]
        return {"prefill": table(self.prefill), "decode": table(self.decode), "mismatched": pairs}
