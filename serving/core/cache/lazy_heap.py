"""A priority queue whose entries may change or disappear while queued. Stale items are skipped when they are popped."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LazyHeap(Generic[Entry]):
    """Entries by key, a tuple that begins with a rank.

    `stamp_of` is an entry's latest stamp, or None if it may not go at present.
    """

    __slots__ = ("_items", "_next", "_stamp_of")

    def __init__(self, stamp_of: Callable[[Entry], int | None]) -> None:
        self._stamp_of = stamp_of
        self._items: list[tuple[tuple[int, ...], int, Entry]] = []
        self._next = 1

    def push(self, key: tuple[int, ...], entry: Entry, *, live: int) -> int:
        """Queue an entry again; returns its stamp, which the entry must remember. `live`: about how many count now."""
        stamp = self._next
        self._next += 1
        if len(self._items) > 64 + 4 * live:
            self._items = [item for item in self._items if self._stamp_of(item[2]) == item[1]]
            heapq.heapify(self._items)
        heapq.heappush(self._items, (key, stamp, entry))
        return stamp

    def pop(self, *, max_rank: int | None = None) -> Entry | None:
        """The first entry to evict, or None if no entry has at most this rank."""
        items = self._items
        while items:
            key, stamp, entry = items[0]
            if self._stamp_of(entry) != stamp:
                heapq.heappop(items)
            elif max_rank is not None and key[0] > max_rank:
                return None
            else:
                heapq.heappop(items)
                return entry
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
