"""The owners of slots and pages: free lists, reference counts, and cached ids that are not in use.

Every id except 0 (the null id) is in exactly one of three states: *free*; *used*, by as many rows as its reference
count; or *cached*: published, not in use, and evicted when space is needed. A used id may also be published.

Ids can be freed without waiting for the device. The device runs steps in the order of dispatch, and ids are taken only
while a step is planned. All steps of a freed id's last owner were planned earlier, so they read and write before the
next owner's first step does. The planner ensures two more conditions. Within one step, an id that a row reads is not
given to another row: its references are dropped only after dispatch. And a slot that the device will itself choose to
read next stays its row's own.
"""

from collections.abc import Callable
from typing import Any


class Pool:
    """Ids 1 .. size - 1. `owners[i]` is the index's entry of a published id, `refs[i]` the number of rows that use
    it.

    With several members, the ids are divided into as many equal parts, the first id of each of which is null too.
    """

    __slots__ = (
        "cached_of", "drop", "each", "free_of", "hold", "name", "on_cached", "owners", "reclaim", "refs", "size"
    )  # fmt: skip

    reclaim: Callable[[bool], bool]
    """Frees one cached id, if one may be evicted; with True, only one of low value. The index sets this and the next
    three functions. Without an index they are never called, because no id is published."""
    on_cached: Callable[[Any], None]
    """Called with an entry whose id is no longer in use."""
    hold: Callable[[str | None, int], None]
    """Called with the client of an entry and 1 when it is published, -1 when it is withdrawn."""
    drop: Callable[[Any], None]
    """Removes an entry from the index, with its dependencies and dependents."""

    def __init__(self, name: str, size: int, members: int = 1) -> None:
        self.name, self.size, self.each = name, size, size // members
        # By member. Popped from the end: low ids first.
        self.free_of = [list(range(end - 1, end - self.each, -1)) for end in range(self.each, size + 1, self.each)]
        self.refs = [0] * size
        self.owners: list[Any] = [None] * size
        self.cached_of = [0] * members

    def __bool__(self) -> bool:
        """Whether it has ids besides null ones. The pool of pages has none for a model without attention."""
        return self.size > len(self.free_of)

    @property
    def total(self) -> int:
        """Number of ids, without null ones."""
        return self.size - len(self.free_of)

    @property
    def free(self) -> list[int]:
        """The free ids of all members."""
        return [i for free in self.free_of for i in free]

    @property
    def num_cached(self) -> int:
        """Number of cached ids of all members."""
        return sum(self.cached_of)

    @property
    def available(self) -> int:
        """Number of ids that can be taken now, equally from all members: free ones and cached ones."""
        each = (len(free) + cached for free, cached in zip(self.free_of, self.cached_of, strict=True))
        return len(self.free_of) * min(each)

    @property
    def used(self) -> int:
        """Number of ids that rows use."""
        return self.total - sum(map(len, self.free_of)) - self.num_cached

    def member_of(self, index: int) -> int:
        """Returns the member that has page `index`, counted from 0, of every row: members have the pages in turn."""
        return index % len(self.free_of)

    def take(self, member: int = 0, *, low_value: bool = False) -> int:
        """Returns a free id of a member with one reference, and evicts cached entries if necessary. Returns 0 if none
        is available. `low_value`: for an entry of low value, which evicts only others of low value."""
        free = self.free_of[member]
        while not free:
            # In the order of eviction: ids of other members may become free before one of this member does.
            if not self.cached_of[member] or not self.reclaim(low_value):
                return 0
        fresh = free.pop()
        self.refs[fresh] = 1
        return fresh

    def retain(self, i: int) -> None:
        """Adds a reference to a used or cached id."""
        if not self.refs[i]:
            self.cached_of[i // self.each] -= 1
        self.refs[i] += 1

    def release(self, i: int) -> None:
        """Removes a reference. Without references, the id becomes cached if it is published, else free."""
        refs = self.refs[i] = self.refs[i] - 1
        if refs:
            return
        owner = self.owners[i]
        if owner is None:
            self.free_of[i // self.each].append(i)
        else:
            self.cached_of[i // self.each] += 1
            self.on_cached(owner)

    def publish(self, i: int, owner: Any) -> None:
        """Publishes a used id. It stays used."""
        self.owners[i] = owner
        self.hold(owner.client, 1)

    def unpublish(self, i: int) -> None:
        """Withdraws a published id: it becomes free, or stays used."""
        self.hold(self.owners[i].client, -1)
        self.owners[i] = None
        if not self.refs[i]:
            self.cached_of[i // self.each] -= 1
            self.free_of[i // self.each].append(i)

    def withdraw(self, i: int) -> None:
        """Removes the published entry of a used id, so that it cannot be found."""
        if self.owners[i] is not None:
            self.drop(self.owners[i])

    def check(self, *, idle: bool = False) -> None:
        """Raises `AssertionError` unless every id is in exactly one state; with `idle`, none may be in use."""
        free = set(self.free)
        assert len(free) == len(self.free), f"{self.name}: one is free twice"
        for null in range(0, self.size, self.each):
            assert null not in free, f"{self.name}: the null one was freed"
            assert self.refs[null] == 0, f"{self.name}: the null one is referenced"
            assert self.owners[null] is None, f"{self.name}: the null one is published"
        for member, own in enumerate(self.free_of):
            assert all(i // self.each == member for i in own), f"{self.name}: {own} hold another member's"
        cached = [0] * len(self.free_of)
        for i in range(1, self.size):
            if not i % self.each:
                continue
            assert self.refs[i] >= 0, f"{self.name}: {i} was released too often"
            if i in free:
                assert not self.refs[i], f"{self.name}: {i} is free and in use"
                assert self.owners[i] is None, f"{self.name}: {i} is free and published"
            elif not self.refs[i]:
                assert self.owners[i] is not None, f"{self.name}: {i} leaked"
                cached[i // self.each] += 1
        assert cached == self.cached_of, f"{self.name}: {cached} cached, {self.cached_of} counted"
        if idle:
            assert self.used == 0, f"{self.name}: {self.used} in use at idle"
            assert len(free) + self.num_cached == self.total, f"{self.name}: some are lost"
