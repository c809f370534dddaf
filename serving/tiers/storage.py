"""Where the parts of the tiers are, for all engines of a process: host memory, and a folder on a disk."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from checkpoints.errors import one_line
from serving.core.cache.content import Name
from serving.core.tiers.tier import Change, Tier, Unit
from serving.tiers.folder import Arrays, Folder
from serving.tiers.listing import Changes, Listing

log = logging.getLogger(__name__)

Part = Future[Arrays]

PATIENCE = 60.0  # seconds after which a part that an engine was to copy counts as lost
_PAUSE = 30.0  # pause in seconds after a write to the disk has failed
_GONE = "it is not in memory any more"
_LOOK = 1.0  # seconds between two looks at a disk that others may write to, at least


class PartReader(NamedTuple):
    """How a thread reads parts of one tier."""

    coming: Sequence[Future[Any]]  # must finish before anything is read
    read: Callable[[Name, Mapping[str, Any]], Arrays]
    """Returns a part's arrays, which must have the shapes and dtypes of the second argument. May raise anything."""


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

    def write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], done: Callable[[str], Any]) -> Part:
        """Stores a unit that was added to the tier by `change`, and removes what went for it. Returns the job.

        `parts`: its own part and all new blocks, which may still be on their way. Those that the tier has since dropped
        are not kept. `done` is called in the end, by any thread, with the reason for a failure or "".
        """
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
                    part.set_exception(KeyError(_GONE))
            return part

    def reader(self, names: Sequence[Name]) -> PartReader:
        """Returns a reader of these parts, some of which may still be on their way."""
        parts = {name: self.get(name) for name in names}
        return PartReader(list(parts.values()), lambda name, specs: dict(parts[name].result(timeout=0)))

    def _drop(self, name: Name) -> None:
        """With the tier's lock."""
        self._parts.pop(name, None)
        promise = self._promises.pop(name, None)
        if promise is not None:
            promise.set_exception(KeyError(_GONE))


class Disk:
    """The disk cache. An engine calls `join` first, `saved` at the end and then `leave`; the last one ends the threads.

    Several engines change the books at once, and files follow in the order in which the one thread is told. So each
    step asks the books again: what they hold by then is not removed, and what they do not is not written. `block`: B;
    `with_blocks`: a unit needs its blocks' files.
    """

    def __init__(self, tier: Tier, folder: Folder, block: int, *, with_blocks: bool) -> None:
        self.tier, self.folder = tier, folder
        self._users = self._unsaved = 0
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="tier-write")
        self._writes: dict[Name, Future[None]] = {}
        """Parts that are being written. The tier has their entries already."""
        self._pause_until = 0.0
        self._closing = threading.Event()
        self._looked, self._changes = threading.Lock(), Changes()
        """Changes that the thread that watches the folder has seen and no engine has applied yet."""
        self._listing = Listing(folder, block, with_blocks=with_blocks)
        self._changes.add(self._listing.look())
        self._looking = threading.Thread(target=self._look, name="tier-look", daemon=True)
        self._looking.start()

    def join(self) -> None:
        """One more engine uses it."""
        with self.tier.lock:
            self._users += 1
            self._unsaved += 1

    def saved(self) -> bool:
        """Records that an engine has written everything that it had to. Returns True for the last engine."""
        with self.tier.lock:
            self._unsaved -= 1
            return not self._unsaved

    def leave(self) -> None:
        """Removes an engine. Its pending writes complete as long as another engine is left."""
        with self.tier.lock:
            self._users -= 1
            last = not self._users
        if last:
            self._closing.set()
            self._writing.shutdown(wait=True, cancel_futures=True)
            self._looking.join()
            self._listing.close()

    def changes(self) -> Changes:
        """What is on the disk, or is no more, since the last call: of an earlier process, or of others that share the
        folder."""
        if not self._changes:
            return self._changes
        with self._looked:
            changes, self._changes = self._changes, Changes()
        return changes

    def write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], done: Callable[[str], Any]) -> Future[None]:
        """See `Memory.write`. One thread writes for all engines, in the order of calls."""
        names = (*change.blocks, unit.name)

        def write() -> None:
            self._remove(change.gone)
            # Without the unit, others may count on blocks that were to come with it.
            error = self._put(unit, [name for name in names if self.tier.holds(name)], parts)
            with self.tier.lock:
                for name in names:
                    if self._writes.get(name) is job:
                        del self._writes[name]
            done(error)

        with self.tier.lock:
            job = self._writing.submit(write)
            self._writes.update(dict.fromkeys(names, job))
        return job

    def reader(self, names: Sequence[Name]) -> PartReader:
        """See `Memory.reader`."""
        with self.tier.lock:
            return PartReader([job for name in names if (job := self._writes.get(name)) is not None], self._read)

    def _read(self, name: Name, specs: Mapping[str, Any]) -> Arrays:
        arrays = self.folder.read(name, specs)
        self.folder.used(name)
        return arrays

    def has(self, name: Name) -> bool:
        """Returns whether a part's file exists."""
        return self.folder.has(name)

    def remove(self, names: Collection[Name]) -> Future[None]:
        """Removes parts that the tier does not hold any more."""
        return self._writing.submit(self._remove, names)

    def _remove(self, names: Collection[Name]) -> None:
        with self.tier.lock:
            gone = [name for name in names if not self.tier.holds(name)]
        self.folder.remove(gone)

    def _put(self, unit: Unit, names: Sequence[Name], parts: Mapping[Name, Part]) -> str:
        """Why it could not be written; "" if it was."""
        if time.monotonic() < self._pause_until:
            return "a recent write to the disk failed"
        try:
            until = time.monotonic() + PATIENCE
            arrays = {name: parts[name].result(max(0.0, until - time.monotonic())) for name in names}
        except Exception as problem:  # the engine that was to copy it has failed; the others are not affected
            log.warning("a checkpoint could not be copied to the disk cache: %s", problem)
            return one_line(problem)
        try:
            for name in names:
                self.folder.write(name, arrays[name], unit if name == unit.name else None)
        except Exception as problem:  # in any case the tier's records must not have the unit
            log.warning("a checkpoint could not be written to the disk cache: %s", problem)
            self._pause_until = time.monotonic() + _PAUSE
            return one_line(problem)
        return ""

    def _look(self) -> None:
        """Runs until the end. The pause between two scans is twenty times the duration of one."""
        pause = _LOOK
        while not self._closing.wait(pause):
            begin = time.monotonic()
            try:
                found = self._listing.look()
            except OSError as error:
                log.debug("the disk cache cannot be read: %s", error)
                continue
            with self._looked:
                self._changes.add(found)
            pause = max(_LOOK, 20 * (time.monotonic() - begin))


TierStorage = Memory | Disk
"""Where the parts of one tier are. Engines in several threads may use it."""


def failure(part: Future[Any]) -> str:
    """Returns why a finished job failed; "" if it did not."""
    if part.cancelled():
        return "cancelled"
    error = part.exception()
    return "" if error is None else one_line(error)


def _pass_on(promise: Part, part: Part) -> None:
    if part.cancelled():
        promise.set_exception(KeyError(_GONE))
    elif (error := part.exception()) is not None:
        promise.set_exception(error)
    else:
        promise.set_result(part.result())
