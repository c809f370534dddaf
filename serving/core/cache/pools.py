"""Who may use which slot and which page: free lists, reference counts, and what is cached but not in use.

Every id but 0 (the null one) is in exactly one of three states: *free*; *used*, by as many rows as its reference count
says; or *cached*: published, not in use, and evicted when space is wanted. An id in use may be published too.

Why freeing needs no waiting for the device. The device runs steps in the order they were dispatched, and ids are handed
out only while a step is planned. Whatever a freed id's last owner still has in flight was dispatched, or was at least
planned, in an earlier step, and so reads and writes before the next owner's first step does. Two cases remain, and both
are kept by the planner: within one step nothing that a row of that step reads may be given to another row of it (its
references are dropped only once the step is dispatched), and a slot that the device itself will choose to read next
stays its row's own.
"""

from collections.abc import Callable
from enum import IntEnum
from typing import Any


class Use(IntEnum):
    """What an id is in."""

    FREE = 0
    USED = 1
    CACHED = 2


class Pool:
    """Ids 1 .. size - 1. `owners[i]` is the index's entry of a published id, `refs[i]` the rows that use it."""

    __slots__ = ("drop", "free", "num_cached", "on_cached", "owners", "reclaim", "refs", "size")

    name = "ids"

    def __init__(self, size: int) -> None:
        self.size = size
        # Popped from the end: low ids first.
        self.free = list(range(size - 1, 0, -1))
        self.refs = [0] * size
        self.owners: list[Any] = [None] * size
        self.num_cached = 0
        self.reclaim: Callable[[], bool] = _nothing_to_reclaim
        """Frees one cached id, if there is one that may go. Set by the index."""
        self.on_cached: Callable[[Any], None] = _ignore
        """Told of an entry whose id is no longer in use. Set by the index."""
        self.drop: Callable[[Any], None] = _ignore
        """Makes an entry unfindable, with all that it needs or that needs it. Set by the index."""

    @property
    def available(self) -> int:
        """Ids that can be taken now: free ones and cached ones."""
        return len(self.free) + self.num_cached

    @property
    def used(self) -> int:
        """Ids in some row's use."""
        return self.size - 1 - len(self.free) - self.num_cached

    def take(self) -> int:
        """A fresh id with one reference, dropping something cached if need be; 0 = none is available."""
        if not self.free and not self.reclaim():
            return 0
        fresh = self.free.pop()
        self.refs[fresh] = 1
        return fresh

    def retain(self, i: int) -> None:
        """One more row uses a used or cached id."""
        if not self.refs[i]:
            self.num_cached -= 1
        self.refs[i] += 1

    def release(self, i: int) -> None:
        """One row fewer uses it; with the last one it becomes cached, if published, or free."""
        refs = self.refs[i] = self.refs[i] - 1
        if refs:
            return
        owner = self.owners[i]
        if owner is None:
            self.free.append(i)
        else:
            self.num_cached += 1
            self.on_cached(owner)

    def publish(self, i: int, owner: Any) -> None:
        """A used id becomes findable; its users stay."""
        self.owners[i] = owner

    def unpublish(self, i: int) -> None:
        """A published id is no longer findable: freed, or left to its users alone."""
        self.owners[i] = None
        if not self.refs[i]:
            self.num_cached -= 1
            self.free.append(i)

    def withdraw(self, i: int) -> None:
        """See that a used id is not findable: what it was published for is dropped."""
        if self.owners[i] is not None:
            self.drop(self.owners[i])

    def use_of(self, i: int) -> Use:
        """Which of the three states an id is in."""
        if self.refs[i]:
            return Use.USED
        return Use.FREE if self.owners[i] is None else Use.CACHED

    def check(self, *, idle: bool = False) -> None:
        """Raise `AssertionError` unless every id is in exactly one state; with `idle`, unless none is used."""
        free = set(self.free)
        assert len(free) == len(self.free), f"{self.name}: one is free twice"
        assert 0 not in free, f"{self.name}: the null one was freed"
        assert self.refs[0] == 0, f"{self.name}: the null one is referenced"
        assert self.owners[0] is None, f"{self.name}: the null one is published"
        cached = 0
        for i in range(1, self.size):
            assert self.refs[i] >= 0, f"{self.name}: {i} was released too often"
            if i in free:
                assert not self.refs[i], f"{self.name}: {i} is free and in use"
                assert self.owners[i] is None, f"{self.name}: {i} is free and published"
            elif not self.refs[i]:
                assert self.owners[i] is not None, f"{self.name}: {i} leaked"
                cached += 1
        assert cached == self.num_cached, f"{self.name}: {cached} cached, {self.num_cached} counted"
        if idle:
            assert self.used == 0, f"{self.name}: {self.used} in use at idle"
            assert len(self.free) + self.num_cached == self.size - 1, f"{self.name}: some are lost"


class SlotPool(Pool):
    """State slots."""

    __slots__ = ("reclaim_interior",)

    name = "slots"

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.reclaim_interior: Callable[[], bool] = _nothing_to_reclaim
        """Frees a cached slot of the least worthy kind only. Set by the index."""

    def take_low_value(self) -> int:
        """A fresh slot for a checkpoint that is not worth much: only a free one, or one of the same little worth."""
        if not self.free and not self.reclaim_interior():
            return 0
        return self.take()


class PagePool(Pool):
    """KV pages."""

    __slots__ = ()

    name = "pages"


def _nothing_to_reclaim() -> bool:
    return False


def _ignore(owner: Any) -> None:
    """Without an index nothing is ever published, so nothing can become cached."""
