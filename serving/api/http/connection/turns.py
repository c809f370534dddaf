"""Clients (API keys) share the event loop's time. The event loop and the engine's thread share one interpreter.

The scheduler divides steps, but reading and answering a request takes as long as a step of a small model. While several
clients have requests, the next request of one begins only when twice the time that its earlier ones took has passed
for each client. It begins at most `_LONGEST` late.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from time import thread_time
from typing import TypeVar

T = TypeVar("T")

_LONGEST = 0.02
"""Seconds between two requests of a client at most, however much time the first one took."""
_WEIGHT = 2
"""Of a second on the event loop: the engine's thread works on a short request for as long again."""


@dataclass
class _Client:
    requests: int = 0
    """Requests that are under way, or wait."""
    next_at: float = 0.0
    """When the next one may begin."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class Turns:
    """The turns of one server. Its clients are those with valid keys, so there is a bounded number of them."""

    def __init__(self) -> None:
        self._clients: dict[str, _Client] = {}
        self._begun = 0
        """Requests under way of all clients."""
        self._active = 0
        """Clients with requests."""

    async def run(self, name: str | None, work: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of a client's request, which begins in its turn; without keys (None) at once."""
        if name is None:
            return await work()
        client, clock = self._clients.setdefault(name, _Client()), asyncio.get_running_loop().time
        client.requests += 1
        self._active += client.requests == 1
        try:
            async with client.turn:
                if self._active > 1:
                    await asyncio.sleep(max(client.next_at - clock(), 0))
            self._begun += 1
            begin, spent = clock(), thread_time()
            try:
                return await work()
            finally:
                part = (thread_time() - spent) / self._begun  # of the loop's time since then; others ran as well
                self._begun -= 1
                next_at = max(client.next_at, begin) + _WEIGHT * part * self._active
                client.next_at = min(next_at, clock() + _LONGEST)
        finally:
            client.requests -= 1
            self._active -= client.requests == 0
