"""The workers that a router knows: who is up, how busy each is, and which one a prompt should go to."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from pydantic import ValidationError

from serving.core.placing import Workload
from serving.split.manifest import Manifest, ManifestMismatch, check
from serving.split.seal import Seal

log = logging.getLogger(__name__)

_MISSES = 3


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
    """Looks at its health, one after the other, that it has not answered in time."""
    manifest: Manifest | None = None
    work: Workload = field(default_factory=Workload)
    """Prompt tokens that this router has given it."""
    _attended: set[asyncio.Timeout] = field(default_factory=set)

    @asynccontextmanager
    async def attended(self, seconds: float) -> AsyncIterator[None]:
        """Around every wait for this worker.

        Raises:
            TimeoutError: it took longer, or the worker has been marked down meanwhile.
        """
        async with asyncio.timeout(max(0.0, seconds)) as scope:
            self._attended.add(scope)
            try:
                yield
            finally:
                self._attended.discard(scope)

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

    def failed(self, why: str) -> None:
        """It did not answer: nothing goes there until a look at its health says otherwise, and nobody waits for it."""
        self.failures += 1
        if self.up:
            log.warning("%s worker %s is down: %s", self.role, self.url, why)
        self.up = False
        self.leave()

    def leave(self) -> None:
        """Nobody waits for it any longer: all waits end as if their time were up."""
        for scope in self._attended:
            if not scope.expired():
                scope.reschedule(asyncio.get_running_loop().time())


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
    mismatched: dict[tuple[str, str], str] = field(default_factory=dict)
    """Pairs of (prefill, decode) that cannot exchange states, and why."""

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

    async def watch(self, interval: float, patience: float = 5.0) -> None:
        """Look at every worker again and again; each answers within `patience` seconds, or has missed a look."""
        while True:
            await asyncio.gather(*(self._look(worker, patience) for worker in (*self.prefill, *self.decode)))
            self._compare()
            await asyncio.sleep(interval)

    async def _look(self, worker: Remote, patience: float) -> None:
        try:
            async with asyncio.timeout(patience):
                answer = await self.client.get(f"{worker.url}/ready", headers=self.headers)
                up, found = answer.status_code == 200, None
                if up and (worker.manifest is None or not worker.up):
                    headers = self.headers | self.seal.headers("/split/manifest", b"")
                    found = await self.client.get(f"{worker.url}/split/manifest", headers=headers)
            if found is not None:
                worker.manifest = Manifest.model_validate(found.json()) if found.status_code == 200 else None
                if worker.manifest is None:
                    log.error("%s is not a %s worker: it answers %d", worker.url, worker.role, found.status_code)
            why, worker.missed = f"status {answer.status_code}", 0
        except (TimeoutError, httpx.TimeoutException):
            # A busy machine is slow to answer; who still answers nothing after some looks is down.
            worker.missed += 1
            up, why = worker.up and worker.missed < _MISSES, "it does not answer"
        except (httpx.HTTPError, ValidationError, ValueError) as error:
            up, why = False, str(error) or type(error).__name__
        if up and not worker.up:
            log.info("%s worker %s is up", worker.role, worker.url)
            worker.up = True
        elif not up and worker.up:
            worker.failed(why)

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
