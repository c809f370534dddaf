"""The workers of a router: their health and load, and the choice of a worker by text."""

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
from serving.core.load_balancing import Workload
from serving.split.http.peer import SealAuth, error_of, headers
from serving.split.settings import RouterSettings
from serving.split.wire import Manifest, ManifestMismatch, check

log = logging.getLogger(__name__)

_MISSES = 3  # consecutive unanswered health checks after which a worker is down
_LOST = 8  # lost requests after which one unanswered health check is enough
_EXHAUSTED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


def local_failure(error: BaseException | None) -> str | None:
    """Returns the cause of an HTTP client's error if it is on this machine (a message that the client refuses to send,
    or no descriptor, port or memory for a connection), so that no worker is blamed for it; None otherwise."""
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
    """The router's view of one worker."""

    url: str
    role: str
    up: bool = True  # true until a request or check fails: a router may start before its workers
    load: int = 0  # running requests of this router
    requests: int = 0
    failures: int = 0
    missed: int = 0  # consecutive unanswered health checks
    lost: int = 0  # requests lost since the last answered health check
    manifest: Manifest | None = None
    work: Workload = field(default_factory=Workload)  # prompt tokens that this router sent to the worker
    _waits: dict[asyncio.Timeout, float] = field(default_factory=dict)
    """Start of each wait on the event loop's clock; minus infinity for a request that can be retried."""

    @asynccontextmanager
    async def attended(self, seconds: float, *, streaming: bool = False) -> AsyncIterator[None]:
        """Limits a wait for this worker. `streaming`: a wait for the next piece of a stream, which cannot be retried.

        Raises:
            TimeoutError: the wait took longer than `seconds`, or the worker is down and the request can be retried.
        """
        async with asyncio.timeout(max(0.0, seconds) if self.up or streaming else 0.0) as scope:
            self._waits[scope] = asyncio.get_running_loop().time() if streaming else -math.inf
            try:
                yield
            finally:
                del self._waits[scope]

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Counts a running request."""
        self.load += 1
        self.requests += 1
        try:
            yield
        finally:
            self.load -= 1

    @contextmanager
    def computing(self, tokens: int, seconds: float = math.inf) -> Iterator[None]:
        """Counts prompt tokens that the worker computes, for at most `seconds`."""
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
        """Sends no requests to this worker until it answers a health check. Ends requests that can be retried, and
        streams that were silent for `stalled_after` seconds."""
        if self.up:
            log.warning("%s worker %s is down: %s", self.role, self.url, why)
        self.up = False
        self.end_waits(stalled_after)

    def end_waits(self, longer_than: float = -math.inf) -> None:
        """Ends all waits that have lasted longer than `longer_than` seconds with a timeout."""
        now = asyncio.get_running_loop().time()
        for scope, since in self._waits.items():
            if now - since > longer_than and not scope.expired():
                scope.reschedule(now)


def choose(workers: Iterable[Remote], key: bytes, *, slack: int, without: Iterable[Remote] = ()) -> Remote | None:
    """Returns the worker for a prompt, always the same one for the same key unless it is too busy or down: rendezvous
    hashing with bounded load (Mirrokni et al., 2018), at most `slack` requests more than the least busy one has."""
    tried = list(without)
    up = [worker for worker in workers if worker.up and worker not in tried]
    if not up:
        return None
    most = min(worker.load for worker in up) + slack
    return max((worker for worker in up if worker.load <= most), key=lambda worker: _weight(worker.url, key))


def _weight(url: str, key: bytes) -> bytes:
    return hashlib.blake2b(key, key=url.encode()[:64], digest_size=8).digest()


class Fleet:
    """All workers of a router, and their health checks. `client` sends all requests to workers."""

    def __init__(self, settings: RouterSettings, client: httpx.AsyncClient) -> None:
        self.settings, self.client, self.auth = settings, client, SealAuth(settings.seal)
        self.headers = headers(settings.api_key)
        """Of the router's own requests. Clients' requests are forwarded with the clients' keys."""
        self.prefill: list[Remote] = []
        self.decode: list[Remote] = []
        self.follow(settings.prefill, settings.decode)
        self.mismatched: dict[tuple[str, str], str] = {}
        """Pairs of (prefill, decode) that cannot exchange states, and why."""
        self._checks: dict[Remote, asyncio.Task[None]] = {}  # running health checks after lost requests

    def follow(self, prefill: Iterable[str], decode: Iterable[str]) -> None:
        """Replaces the lists of workers. Running requests of removed workers continue."""
        for role, urls, known in (("prefill", prefill, self.prefill), ("decode", decode, self.decode)):
            wanted = dict.fromkeys(url.rstrip("/") for url in urls)
            known[:] = [worker for worker in known if worker.url in wanted]
            there = {worker.url for worker in known}
            known += [Remote(url, role) for url in wanted if url not in there]

    async def watch(self) -> None:
        """Checks every worker's health again and again."""
        while True:
            await asyncio.gather(*(self._check_health(worker) for worker in (*self.prefill, *self.decode)))
            self._compare()
            await asyncio.sleep(self.settings.check_interval)

    def lost_request(self, worker: Remote, why: str) -> None:
        """Counts a request that failed without an answer. Any client may have caused this, also several at the same
        moment, so a health check decides whether the worker is down."""
        worker.failures += 1
        if not worker.up:
            return
        worker.lost += 1
        log.debug("%s worker %s lost a request: %s", worker.role, worker.url, why)
        if worker not in self._checks:
            check = self._checks[worker] = asyncio.create_task(self._check_health(worker, with_manifest=False))
            check.add_done_callback(lambda _: self._checks.pop(worker, None))

    async def _check_health(self, worker: Remote, *, with_manifest: bool = True) -> None:
        try:
            async with asyncio.timeout(self.settings.check_timeout):
                answer = await self.client.get(f"{worker.url}/ready", headers=self.headers)
                up, manifest = answer.status_code == 200, None
                if answer.status_code == 503 and error_of(503, answer.content).code == TOO_MANY_CONNECTIONS:
                    worker.missed = worker.lost = 0  # it answers: keep its state
                    return
                if up and with_manifest and (worker.manifest is None or not worker.up):
                    url = f"{worker.url}/split/manifest"
                    manifest = await self.client.get(url, headers=self.headers, auth=self.auth)
            if manifest is not None:
                worker.manifest = Manifest.model_validate(manifest.json()) if manifest.status_code == 200 else None
                if worker.manifest is None:
                    log.error("%s is not a %s worker: status %d", worker.url, worker.role, manifest.status_code)
            why, worker.missed, worker.lost = f"status {answer.status_code}", 0, 0
        except (TimeoutError, httpx.TimeoutException, httpx.NetworkError, httpx.ProtocolError) as error:
            if (local := local_failure(error)) is not None:
                log.warning("could not check %s worker %s: %s", worker.role, worker.url, local)
                return
            # A busy machine answers late, and a server may close an idle connection just before it is used again. Only
            # a refused connection proves that the worker is down.
            refused = isinstance(error, httpx.ConnectError)
            worker.missed = _MISSES if refused or worker.lost >= _LOST else worker.missed + 1
            up, why = worker.up and worker.missed < _MISSES, str(error) or "no answer"
        except (httpx.HTTPError, ValidationError, ValueError) as error:
            up, why = False, str(error) or type(error).__name__
        if up and not worker.up:
            log.info("%s worker %s is up", worker.role, worker.url)
            worker.up = True
        elif not up:
            worker.failures += worker.up
            worker.mark_down(why, self.settings.check_timeout)

    def _compare(self) -> None:
        """Logs each pair of workers that cannot exchange states, once."""
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
        """Returns the health and load of all workers."""

        def table(workers: list[Remote]) -> list[dict[str, Any]]:
            names = ("url", "up", "load", "requests", "failures")
            return [{name: getattr(worker, name) for name in names} for worker in workers]

        pairs = [{"prefill": one, "decode": other, "why": why} for (one, other), why in self.mismatched.items()]
        return {"prefill": table(self.prefill), "decode": table(self.decode), "mismatched": pairs}
