"""Parts in host memory by name, shared by all engines of a process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple, Protocol

from serving.core.cache.content import Name
from serving.core.tiers.tier import Change, Tier, Unit
from serving.tiers.folder import Arrays

Part = Future[Arrays]

PATIENCE = 60.0
"""Seconds after which a part that an engine was to copy counts as lost."""


class PartReader(NamedTuple):
    """How a thread reads parts of one tier."""

    coming: Sequence[Future[Any]]
    """Must finish before anything is read."""
    read: Callable[[Name, Mapping[str, Any]], Arrays]
    """Returns a part's arrays, which must have the shapes and dtypes of the second argument. May raise anything."""


class TierStorage(Protocol):
    """Where the parts of one tier are: `Memory` or `Disk`. Engines in several threads may use it."""

    tier: Tier

    def write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], done: Callable[[str], Any]) -> Future[Any]:
        """Stores a unit that was added to the tier, and removes what went for it.

        Args:
            unit: the unit.
            change: what adding it changed.
            parts: its own part and all new blocks, which may still be on their way.
            done: called in the end, by any thread, with the reason for a failure or "".

        Returns:
            A job that ends with the write.
        """

    def remove(self, names: Collection[Name]) -> Future[Any] | None:
        """Removes parts that the tier does not hold any more. Returns the job, if it takes time."""

    def has(self, name: Name) -> bool:
        """Returns whether a part is here, or on its way."""

    def reader(self, names: Sequence[Name]) -> PartReader:
        """Returns a reader of these parts, some of which may still be on their way."""


class Memory:
    """Parts in host memory: never more than the tier's ledger lists, and dropped with their entries. Thread-safe.

    An engine's plan enters a unit into the ledger, and starts the copy a moment later. A request for the unit in
    between gets a future, which that copy completes, or which fails when the unit leaves the ledger.

    Args:
        tier: the books. From now on they tell this one what they drop.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        tier.dropped = self._drop
        self._parts: dict[Name, Part] = {}
        self._promises: dict[Name, Part] = {}

    def __len__(self) -> int:
        return len(self._parts)

    def write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], done: Callable[[str], Any]) -> Part:
        """See `TierStorage`. Parts that the tier has since dropped are not kept."""
        with self.tier.lock:
            for name, part in parts.items():
                if self.tier.holds(name):
                    self._parts[name] = part
                    promise = self._promises.pop(name, None)
                    if promise is not None:
                        part.add_done_callback(partial(_pass_on, promise))
        last = parts[unit.name]
        last.add_done_callback(lambda part: done(failure(part)))
        return last

    def remove(self, names: Collection[Name]) -> None:
        """Does nothing: the tier tells when it drops a part."""

    def has(self, name: Name) -> bool:
        """Returns whether a part is here, or on its way."""
        return name in self._parts

    def get(self, name: Name) -> Part:
        """A part, which may still be on its way. One that the books do not have has failed with KeyError."""
        with self.tier.lock:
            part = self._parts.get(name) or self._promises.get(name)
            if part is None:
                part = Future()
                if self.tier.holds(name):
                    self._promises[name] = part
                else:
                    part.set_exception(_gone())
            return part

    def reader(self, names: Sequence[Name]) -> PartReader:
        """See `TierStorage`."""
        parts = {name: self.get(name) for name in names}
        return PartReader(list(parts.values()), lambda name, specs: dict(parts[name].result(timeout=0)))

    def _drop(self, name: Name) -> None:
        """With the tier's lock."""
        self._parts.pop(name, None)
        promise = self._promises.pop(name, None)
        if promise is not None:
            promise.set_exception(_gone())


def failure(part: Future[Any]) -> str:
    """Returns why a finished job failed; "" if it did not."""
    if part.cancelled():
        return "cancelled"
    error = part.exception()
    return "" if error is None else str(error) or type(error).__name__


def _gone() -> KeyError:
    return KeyError("it is not in memory any more")


def _pass_on(promise: Part, part: Part) -> None:
    if part.cancelled():
        promise.set_exception(_gone())
    elif (error := part.exception()) is not None:
        promise.set_exception(error)
    else:
        promise.set_result(part.result())
