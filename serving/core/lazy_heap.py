"""A priority queue whose entries may change or vanish while queued: stale items are skipped when they come up."""

import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class LazyHeap(Generic[Entry]):
    """Entries by (rank, last use). `stamp_of` is an entry's latest stamp, or None if it may not go at present."""

    __slots__ = ("_items", "_next", "_stamp_of")

    def __init__(self, stamp_of: Callable[[Entry], int | None]) -> None:
        self._stamp_of = stamp_of
        self._items: list[tuple[int, int, int, Entry]] = []
        self._next = 1

    def push(self, rank: int, last_use: int, entry: Entry, *, live: int) -> int:
        """Queue an entry anew and return its stamp, which the entry must remember. `live`: about how many count now."""
        stamp = self._next
        self._next += 1
        if len(self._items) > 64 + 4 * live:
            self._items = [item for item in self._items if self._stamp_of(item[3]) == item[2]]
            heapq.heapify(self._items)
        heapq.heappush(self._items, (rank, last_use, stamp, entry))
        return stamp

    def pop(self, *, max_rank: int | None = None) -> Entry | None:
        """The entry that goes first, or None if there is none (of at most that rank)."""
        items = self._items
        while items:
            rank, _, stamp, entry = items[0]
            if self._stamp_of(entry) != stamp:
                heapq.heappop(items)
            elif max_rank is not None and rank > max_rank:
                return None
            else:
                heapq.heappop(items)
                return entry
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()
