"""The order in which the entries of a store are evicted: fair between clients, and cheapest first within one.

A client's share is 1/k of what k clients hold. The client that holds most loses its own entries first, so that none
below its share loses an entry to another one, as long as another one has entries that may go.
"""

import heapq
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from serving.core.cache.retention import Clock, EvictionRank

ABSENT_SECONDS = 3600.0
"""Time after its last use of an entry for which a client keeps its share."""

Entry = TypeVar("Entry")


class LazyHeap(Generic[Entry]):
    """A queue of entries by key, a tuple that begins with a rank. Entries may change or disappear while queued.

    `stamp_of` is an entry's latest stamp, or None if it may not go at present.
    """

    __slots__ = ("_items", "_most", "_next", "_stamp_of", "used_at")

    def __init__(self, stamp_of: Callable[[Entry], int | None]) -> None:
        self._stamp_of = stamp_of
        self._items: list[tuple[tuple[int, ...], int, Entry]] = []
        self._next = 1
        self._most = 64
        self.used_at = 0.0
        """When an entry was last queued."""

    def push(self, key: tuple[int, ...], entry: Entry) -> int:
        """Queue an entry again; returns its stamp, which the entry must remember."""
        stamp = self._next
        self._next += 1
        if len(self._items) > self._most:
            self._items = [item for item in self._items if self._stamp_of(item[2]) == item[1]]
            heapq.heapify(self._items)
            self._most = 64 + 4 * len(self._items)
        heapq.heappush(self._items, (key, stamp, entry))
        return stamp

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
    client, None. With k clients and n entries, a push costs O(log n), and a pop O(k log k + log n), both amortized.

    Args:
        stamp_of: an entry's latest stamp, or None if it may not go at present.
    """

    def __init__(self, stamp_of: Callable[[Entry], int | None], clock: Clock = time.monotonic) -> None:
        self._stamp_of, self._clock = stamp_of, clock
        self._queues: dict[str | None, LazyHeap[Entry]] = {}
        self.held: Counter[str | None] = Counter()
        """Entries, or bytes, by client. Entries in use count, too."""

    def hold(self, client: str | None, amount: int) -> None:
        """Records that a client holds more of the store, or less."""
        self.held[client] += amount
        if not self.held[client]:
            del self.held[client]
            self._queues.pop(client, None)

    def check(self, owners: Iterable[Any]) -> None:
        """Raises `AssertionError` unless clients hold these entries, which may be None."""
        held = Counter(each.client for each in owners if each is not None)
        assert self.held == held, f"clients hold {held}, counted: {self.held}"

    def push(self, client: str | None, key: tuple[int, ...], entry: Entry) -> int:
        """Queues an entry of a client that holds something; returns its stamp, which the entry must remember. `key`
        begins with the rank."""
        queue = self._queues.get(client)
        if queue is None:
            queue = self._queues[client] = LazyHeap(self._stamp_of)
        queue.used_at = self._clock()
        return queue.push(key, entry)

    def pop(self, max_rank: EvictionRank = EvictionRank.KEPT) -> Entry | None:
        """Returns the entry to evict next; None if none has at most this rank.

        Stale entries go first, then those of absent clients which no mark keeps, then those of the client that holds
        most. An entry of low value (`INTERIOR`) takes no place of a client below its share.
        """
        held, late = self.held, self._clock() - ABSENT_SECONDS
        clients = sorted(self._queues, key=held.__getitem__, reverse=True)
        absent = [client for client in clients if self._queues[client].used_at < late]
        losing = clients
        if max_rank < EvictionRank.VALUABLE:
            losing = [client for client in clients if held[client] * len(held) >= held.total()]
        for rank, those in ((EvictionRank.STALE, clients), (EvictionRank.VALUABLE, absent), (max_rank, losing)):
            for client in those:
                entry = self._queues[client].pop(min(rank, max_rank))
                if entry is not None:
                    return entry
        return None
