"""Away from the device: copies out of the store before a step, into memory and to the disk behind it.

Nothing here waits for the device or the disk in the engine's thread. What leaves is copied by a program that is in the
device's queue before the step that writes over it; a thread reads the copy, another one writes files.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

import numpy as np

from mamba_jax.store import Store
from serving.core import Scheduler
from serving.core.tiers.content import Name
from serving.core.tiers.tier import Change, Unit
from serving.core.tiers.tiers import Departure, Held, Tiers
from serving.points.point import PointPrograms
from serving.tiers.folder import Arrays, Folder
from serving.tiers.layout import Layout
from serving.tiers.listing import Changes, Listing

log = logging.getLogger(__name__)

_PAUSE = 30.0
"""Seconds for which nothing is written to a disk that has refused a file."""
_LOOK = 1.0
"""Seconds between two looks at a disk that others may write to, at least."""
KV = "kv"

Part = Future[Arrays]


class Stopped(Protocol):
    """What is needed of a step loop that has stopped."""

    scheduler: Scheduler

    @property
    def store(self) -> Store | None:
        """As it is now."""
        ...


class Leaving:
    """What is below the device of one engine, and its ways there.

    Args:
        tiers: the policy, whose books say what is where.
        layout: of the engine's store.
        programs: that take points out.
        folder: of the disk tier.
    """

    def __init__(self, tiers: Tiers, layout: Layout, programs: PointPrograms, folder: Folder | None) -> None:
        self.tiers, self.layout, self.programs, self.folder = tiers, layout, programs, folder
        self.parts: dict[Name, Part] = {}
        """Of the host's memory. Changed by the engine's thread alone, as is the next."""
        self.writes: dict[Name, Future[Any]] = {}
        """What is on its way to the disk, whose books have it already: to be waited for before it is read."""
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="tier-write")
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What other threads have to tell the engine's."""
        self._pause_until = 0.0
        self._closing = threading.Event()
        self._jobs: set[Future[Any]] = set()
        self._looked, self._changes = threading.Lock(), Changes()
        """What the thread that looks at the folder has seen, and nobody has taken in."""
        self._listing: Listing | None = None
        if folder is not None:
            self._listing = Listing(folder.path, layout.block, with_blocks=layout.kv is not None)
            self._changes.add(self._listing.look())
            self._take_in_others()
            self.remove_gone()
            if tiers.disk is not None and tiers.disk.units:
                log.info("disk cache: %d checkpoints found in %s", len(tiers.disk), folder.path)
            self._looking = threading.Thread(target=self._look, args=(self._listing,), name="tier-look", daemon=True)
            self._looking.start()

    def _take_in_others(self) -> None:
        """What is on the disk and was not the last time: of an earlier process, or of others that share the folder."""
        with self._looked:
            changes, self._changes = self._changes, Changes()
        if changes:
            self.tiers.others_changed(changes.gone, changes.new.values(), changes.used)

    def _look(self, listing: Listing) -> None:
        """Until all ends. Between two looks there are twenty times as many seconds as one takes."""
        pause = _LOOK
        while not self._closing.wait(pause):
            begin = time.monotonic()
            try:
                found = listing.look()
            except OSError as error:
                log.debug("the disk cache cannot be read: %s", error)
                continue
            with self._looked:
                self._changes.add(found)
            pause = max(_LOOK, 20 * (time.monotonic() - begin))

    def copy_out(self, store: Store | None) -> None:
        """After a plan and before anything else is dispatched: copy what it has evicted."""
        self.remove_gone()
        for departure in self.tiers.take_departures():
            if store is None or self._closing.is_set():
                self._never_came(departure)
            else:
                self._depart(store, departure)

    def take_in(self) -> None:
        """Note what threads have done, and what other processes have."""
        if self._changes:
            self._take_in_others()
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            event()

    def save(self, loop: Stopped, until: float) -> None:
        """Bring what the device of a loop that has stopped holds to the disk: the most valuable first, as far as there
        is time."""
        index = loop.scheduler.index
        for entry in index.by_worth() if index is not None else ():
            if time.monotonic() > until:
                return
            self.tiers.left(entry, False)
            self.copy_out(loop.store)
            self.settle(until - time.monotonic())
        self._spill_all(until)

    def close(self) -> None:
        """End all threads."""
        self._closing.set()
        for executor in (self._copying, self._writing):
            executor.shutdown(wait=True, cancel_futures=True)
        if self._listing is not None:
            self._looking.join()
            self._listing.close()

    @property
    def closed(self) -> bool:
        """Whether it has been."""
        return self._closing.is_set()

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until everything that has left the device is where it is going: for the end, and for tests."""
        until = time.monotonic() + seconds
        while jobs := {job for job in self._jobs if not job.done()}:
            if time.monotonic() > until:
                return
            wait(jobs, timeout=max(0.0, until - time.monotonic()))
        self._jobs.clear()
        self.take_in()
        self.remove_gone()

    def _depart(self, store: Store, departure: Departure) -> None:
        unit, layout, programs = departure.unit, self.layout, self.programs
        per_block = layout.pages_per_block
        parts: dict[Name, Part] = {}
        for at, name in enumerate(unit.blocks) if layout.kv is not None else ():
            if name in departure.change.blocks:
                kv = programs.read_piece(store, departure.pages_of(at, per_block), layout.block, layout.layers)
                parts[name] = self._copy({KV: kv}, layout.block)
        arrays = dict(programs.read_state(store, departure.slot))
        if layout.kv is not None and unit.tail:
            pages = departure.tail_pages(per_block)
            pages = pages + [0] * (per_block - len(pages))
            arrays[KV] = programs.read_piece(store, pages, unit.tail, layout.layers)
        parts[unit.name] = last = self._copy(arrays, -(-unit.tail // layout.page_size) * layout.page_size)
        size = departure.change.bytes
        last.add_done_callback(lambda part: self._events.put(lambda: self._copied(departure, part, size)))
        if departure.tier is self.tiers.host:
            for name in departure.change.gone:
                self.parts.pop(name, None)
            self.parts.update(parts)
            change = self.tiers.spill(unit) if not departure.memory_only else None
            if change is not None:
                needed = {name: self.parts[name] for name in (*change.blocks, unit.name)}
                self._write(unit, change, needed, spilled=True)
        else:
            self._write(unit, departure.change, parts, spilled=False)

    def _copy(self, arrays: Mapping[str, Any], tokens: int) -> Part:
        """Arrays of the device as arrays of the host; of keys and values, the first `tokens`."""
        for array in arrays.values():
            array.copy_to_host_async()

        def copy() -> Arrays:
            found = {name: np.asarray(array) for name, array in arrays.items()}
            if KV in found and found[KV].shape[1] > tokens:
                found[KV] = np.ascontiguousarray(found[KV][:, :tokens])
            return found

        return self._job(self._copying, copy)

    def _copied(self, departure: Departure, part: Part, size: int) -> None:
        self.tiers.moved(size)
        if part.cancelled() or part.exception() is not None:
            log.warning("a checkpoint did not leave the device: %s", "" if part.cancelled() else part.exception())
            self.tiers.lost(Held(departure.tier, departure.unit))

    def _never_came(self, departure: Departure) -> None:
        self.tiers.moved(departure.change.bytes)
        if departure.tier is self.tiers.host:
            for name in departure.change.gone:
                self.parts.pop(name, None)
        elif self.folder is not None:
            self._job(self._writing, self.folder.remove, departure.change.gone)
        self.tiers.lost(Held(departure.tier, departure.unit))

    def _write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], *, spilled: bool) -> None:
        disk, folder = self.tiers.disk, self.folder
        assert disk is not None
        assert folder is not None

        names = (*change.blocks, unit.name)

        def write() -> None:
            error = ""
            folder.remove(change.gone)
            try:
                if time.monotonic() < self._pause_until:
                    raise OSError("the disk has refused a file lately")
                for name in names:
                    folder.write(name, parts[name].result(), unit if name == unit.name else None)
            except Exception as problem:  # whatever it is, the books must say that the unit is not there
                if not isinstance(problem, OSError) or time.monotonic() >= self._pause_until:
                    log.warning("the disk cache does not take a checkpoint: %s", problem)
                    self._pause_until = time.monotonic() + _PAUSE
                error = str(problem) or type(problem).__name__
            self._events.put(lambda: written(error))

        def written(error: str) -> None:
            for name in names:
                if self.writes.get(name) is job:
                    del self.writes[name]
            if spilled:
                self.tiers.spilled(change.bytes)
            if error:
                self.tiers.lost(Held(disk, unit))
                for name in change.blocks:
                    # Other units may count on blocks that were to be written with this one.
                    if disk.has_block(name) and not folder.has(name):
                        self.tiers.lost_block(disk, name)

        job = self._job(self._writing, write)
        self.writes.update(dict.fromkeys(names, job))

    def remove_gone(self) -> None:
        """Let go of what nobody holds any more."""
        for tier, names in self.tiers.take_gone():
            if tier is self.tiers.host:
                for name in names:
                    self.parts.pop(name, None)
            elif self.folder is not None and names and not self._closing.is_set():
                self._job(self._writing, self.folder.remove, names)

    def _spill_all(self, until: float) -> None:
        """What memory has and the disk has not, because too much was on its way at the time."""
        host = self.tiers.host
        for unit in host.worth_spilling() if host is not None else ():
            change = self.tiers.spill(unit)
            if change is not None:
                parts = {name: self.parts[name] for name in (*change.blocks, unit.name)}
                self._write(unit, change, parts, spilled=True)
                self.settle(until - time.monotonic())
            if time.monotonic() > until:
                return

    def _job(self, executor: ThreadPoolExecutor, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        if len(self._jobs) > 256:
            self._jobs = {job for job in self._jobs if not job.done()}
        job = executor.submit(function, *arguments)
        self._jobs.add(job)
        return job
