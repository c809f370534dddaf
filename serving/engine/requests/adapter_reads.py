"""Reads adapters' files for clients of a server: in threads of their own, with a deadline, and with a fair share."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from serving.core.errors import RequestError

T = TypeVar("T")

READ_SECONDS = 60.0
"""Deadline of one read."""
MAX_READS = 4
"""Reads at the same time."""
MAX_THREADS = 32
"""Threads that read, with those that have missed their deadline: a file system can stop answering."""
CLIENT_SHARE = 0.2
"""Share of the time in which one client's adapters may be read, while there are requests of others."""
OTHERS_SECONDS = 10.0
"""How long a client counts after its last request."""
LEAST_SECONDS = 0.05
"""Time that a read counts at least, for the part of loading that is not reading."""


class AdapterReads:
    """The reads of one server. Belongs to one event loop.

    The reads of one client follow each other, with a pause after each, so that a client whose requests rotate through
    more adapters than the device holds does not take the engine's time from others. Clients are served in turn.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_READS)
        self._turns: dict[str | None, asyncio.Lock] = {}
        self._waiting: Counter[str | None] = Counter()
        self._next: dict[str | None, float] = {}
        """When a client's next read may begin, by the clock of time.monotonic."""
        self._latest: dict[str | None, float] = {}
        """When the latest two clients sent their latest request."""
        self._threads = threading.Semaphore(MAX_THREADS)

    def seen(self, client: str | None) -> None:
        """Records a request of a client."""
        self._latest.pop(client, None)
        self._latest[client] = time.monotonic()
        if len(self._latest) > 2:
            del self._latest[next(iter(self._latest))]

    async def in_turn(self, client: str | None, function: Callable[[], T], loaded: Callable[[], bool]) -> T | None:
        """Returns the result of a function that reads an adapter for a request of this client; None if the adapter is
        `loaded` when it is the request's turn.

        Raises:
            RequestError: as `read`; or as the function.
        """
        turn = self._turns.setdefault(client, asyncio.Lock())
        self._waiting[client] += 1
        try:
            async with turn:
                while not loaded() and (left := self._pause(client)) > 0:
                    await asyncio.sleep(min(left, LEAST_SECONDS))
                if loaded():
                    return None
                async with self._slots:
                    begin = time.monotonic()
                    try:
                        return await self.read(function)
                    finally:
                        took = max(LEAST_SECONDS, time.monotonic() - begin)
                        self._next[client] = begin + took / CLIENT_SHARE
        finally:
            self._waiting[client] -= 1
            if not self._waiting[client]:
                del self._waiting[client], self._turns[client]
                now = time.monotonic()
                self._next = {each: at for each, at in self._next.items() if at > now}

    def _pause(self, client: str | None) -> float:
        now = time.monotonic()
        others = any(each != client and now - at < OTHERS_SECONDS for each, at in self._latest.items())
        return max(0.0, self._next.get(client, 0.0) - now) if others else 0.0

    async def read(self, function: Callable[[], T], seconds: float | None = None) -> T:
        """Returns the result of a function that reads files, without waiting for other reads.

        Raises:
            RequestError: the function has not ended after `seconds` (None: `READ_SECONDS`), or too many do not end; or
                as the function.
        """
        if not self._threads.acquire(blocking=False):
            raise RequestError(f"{MAX_THREADS} reads of files do not end; check their file system", retry=True)
        result: Future[T] = Future()
        result.set_running_or_notify_cancel()  # the thread sets it even after the deadline

        def run() -> None:
            try:
                try:
                    value = function()
                finally:
                    self._threads.release()
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)

        begin = time.monotonic()
        # A daemon: the process can end while a read does not.
        threading.Thread(target=run, name="adapter read", daemon=True).start()
        try:
            return await asyncio.wait_for(asyncio.wrap_future(result), READ_SECONDS if seconds is None else seconds)
        except TimeoutError:
            took = time.monotonic() - begin
            raise RequestError(f"the files could not be read in {took:.0f} s") from None
