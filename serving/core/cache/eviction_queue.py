"""The order in which the entries of a store are evicted: fair between clients, and cheapest first within one.

A client's share is 1/k of what k clients hold. The client that holds most loses its own entries first, so that none
below its share loses an entry to another one, as long as another one has entries that may go.
"""

import heapq
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import count, takewhile
from typing import Any, Generic, TypeVar

from serving.core.cache.retention import Clock, EvictionRank

ABSENT_SECONDS = 3600.0
"""Time after its last use of an entry for which a client keeps its share."""

Entry = TypeVar("Entry")


class LazyHeap(Generic[Entry]):
    """A queue of entries by key, a tuple that begins with a rank. Entries may change or disappear while queued.

    `stamp_of` is an entry's latest stamp, or None if it may not go at present.
    """

    __slots__ = ("_items", "_most", "_stamp_of", "used_at")

    def __init__(self, stamp_of: Callable[[Entry], int | None]) -> None:
        self._stamp_of = stamp_of
        self._items: list[tuple[tuple[int, ...], int, Entry]] = []
        self._most = 64
        self.used_at = 0.0
        """When an entry of the client was last used."""

    def push(self, key: tuple[int, ...], stamp: int, entry: Entry) -> None:
        """Queue an entry again."""
        if len(self._items) > self._most:
            self._items = [item for item in self._items if self._stamp_of(item[2]) == item[1]]
            heapq.heapify(self._items)
            self._most = 64 + 4 * len(self._items)
        heapq.heappush(self._items, (key, stamp, entry))

    def pop(self, max_rank: int) -> Entry | None:
        """The first entry to evict, or None if no entry has at most this rank."""
        items = self._items
        while items:
            key, stamp, entry = items[0]
            if self._stamp_of(entry) != stamp:
                heapq.heappop(items)
            elif key[0] > max_rank:
                return None
            else:
                heapq.heappop(items)
                return entry
        return None


class EvictionQueue(Generic[Entry]):
    """The entries of a store that may be evicted, and what each client holds of the store.

    An entry counts for the client whose request added it, also while others use it. Without API keys there is one
    client, None. With k clients and n entries, a push costs O(log n) and a pop O(k + log n), both amortized; if the
    client that holds most has no entry that may go, a pop costs O(k log k + log n).

    Args:
        stamp_of: an entry's latest stamp, or None if it may not go at present.
    """

    def __init__(self, stamp_of: Callable[[Entry], int | None], clock: Clock = time.monotonic) -> None:
        self._stamp_of, self._clock = stamp_of, clock
        self._queues: dict[str | None, LazyHeap[Entry]] = {}
        """By client, the least recently used first."""
        self._stale: dict[str | None, None] = {}
        """Clients that may have stale entries."""
        self._last_stamp = 0
        self.held: Counter[str | None] = Counter()
        """Entries, or bytes, by client. Entries in use count, too."""
        self.total = 0
        """The sum of `held`."""

    def hold(self, client: str | None, amount: int) -> None:
        """Records that a client holds more of the store, or less."""
        self.held[client] += amount
        self.total += amount
        if not self.held[client]:
            del self.held[client]
            self._queues.pop(client, None)

    def check(self, owners: Iterable[Any]) -> None:
        """Raises `AssertionError` unless clients hold these entries, which may be None."""
        held = Counter(each.client for each in owners if each is not None)
        assert self.held == held, f"clients hold {held}, counted: {self.held}"
        assert self.total == held.total(), f"clients hold {held.total()}, counted: {self.total}"

    def use(self, client: str | None) -> None:
        """Records that an entry of a client that holds something was used."""
        queue = self._queues.pop(client, None) or LazyHeap(self._stamp_of)
        queue.used_at = self._clock()
        self._queues[client] = queue

    def push(self, client: str | None, key: tuple[int, ...], entry: Entry) -> int:
        """Queues an entry of a client that was used (`use`), also again; returns its stamp, which the entry must
        remember. `key` begins with the rank."""
        self._last_stamp += 1
        if key[0] == EvictionRank.STALE:
            self._stale[client] = None
        self._queues[client].push(key, self._last_stamp, entry)
        return self._last_stamp

    def pop(self, max_rank: EvictionRank = EvictionRank.KEPT) -> Entry | None:
        """Returns the entry to evict next; None if none has at most this rank.

        Stale entries go first, then those of absent clients which no mark keeps, then those of the client that holds
        most. An entry of low value (`INTERIOR`) takes no place of a client below its share.
        """
        for client in [*self._stale]:
            entry = self._pop_of(client, EvictionRank.STALE)
            if entry is not None:
                return entry
            del self._stale[client]
        late = self._clock() - ABSENT_SECONDS
        absent = takewhile(lambda client: self._queues[client].used_at < late, self._queues)
        for rank, clients in ((EvictionRank.VALUABLE, absent), (EvictionRank.KEPT, self._losing(max_rank))):
            for client in clients:
                entry = self._pop_of(client, min(rank, max_rank))
                if entry is not None:
                    return entry
        return None

    def _losing(self, max_rank: EvictionRank) -> Iterator[str | None]:
        """The clients that may lose entries of at most this rank, the one that holds most first."""
        held = self.held
        least = self.total if max_rank < EvictionRank.VALUABLE else 0
        clients = [client for client in self._queues if held[client] * len(held) >= least]
        if clients:
            yield (first := max(clients, key=held.__getitem__))
            clients.remove(first)
            yield from sorted(clients, key=held.__getitem__, reverse=True)

    def _pop_of(self, client: str | None, max_rank: int) -> Entry | None:
        queue = self._queues.get(client)
        return queue.pop(max_rank) if queue is not None else None


def in_turn(entries: Iterable[Any]) -> list[Any]:
    """Returns entries in an order in which their clients take turns: those of each stay in their order."""
    turns: defaultdict[str | None, count[int]] = defaultdict(count)
    return sorted(entries, key=lambda entry: next(turns[entry.client]))
