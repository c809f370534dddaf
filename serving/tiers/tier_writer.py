"""Away from the device: copies out of the store before a step, into memory and to the disk behind it.

Nothing here waits for the device or the disk in the engine's thread. What leaves is copied by a program that is in the
device's queue before the step that writes over it; a thread reads the copy, another one writes files.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from mamba_jax.store import Store
from serving.core.cache.content import Name
from serving.core.tiers.tier import Change, Unit
from serving.core.tiers.tiers import TierCopy, TierHit, Tiers
from serving.points.inbox import Inbox
from serving.points.point import PointPrograms
from serving.points.state_source import Loop
from serving.tiers.disk import Disk
from serving.tiers.folder import Arrays
from serving.tiers.layout import Layout
from serving.tiers.memory import Memory, Part

log = logging.getLogger(__name__)

KV = "kv"


class TierWriter:
    """One engine's ways below the device.

    Args:
        tiers: the policy, whose books say what is where.
        layout: of the engine's store.
        programs: that take points out.
        memory: of the host tier; like the next, perhaps shared with other engines.
        disk: the disk tier.
        inbox: of the engine's loop.
    """

    def __init__(
        self,
        tiers: Tiers,
        layout: Layout,
        programs: PointPrograms,
        memory: Memory | None,
        disk: Disk | None,
        inbox: Inbox,
    ) -> None:
        self.tiers, self.layout, self.programs, self.memory, self.disk = tiers, layout, programs, memory, disk
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._inbox = inbox
        self._closing = threading.Event()
        self._jobs: set[Future[Any]] = set()
        if disk is not None:
            disk.join()
            self.take_in_others()
            self.remove_gone()

    def copy_out(self, store: Store | None) -> None:
        """Called after a plan and before its dispatch: copies the states and pages that the plan evicted."""
        self.remove_gone()
        for planned in self.tiers.take_copies():
            if store is None or self._closing.is_set():
                self._discard_copy(planned)
            else:
                self._copy_unit(store, planned)

    def take_in_others(self) -> None:
        """Applies what other processes have changed on the disk."""
        changes = self.disk.changes() if self.disk is not None and not self.tiers.weights_replaced else None
        if changes:
            self.tiers.sync_external(changes.gone, changes.new.values(), changes.used)

    def save(self, loop: Loop | None, disk: Disk, until: float) -> None:
        """Bring what the device of a loop that has stopped holds to the disk: the most valuable first, as far as there
        is time. The last engine brings what is left in memory."""
        if loop is not None and loop.store is not None and loop.scheduler.index is not None:
            for entry in loop.scheduler.index.by_worth():
                if time.monotonic() > until:
                    break
                self.tiers.keep(entry, low_value=False)
                self.copy_out(loop.store)
                self.settle(until - time.monotonic())
        if disk.saved() and loop is not None:
            self._spill_all(until)

    def close(self) -> None:
        """Ends all threads. Shared threads end with the last engine that uses them."""
        self._closing.set()
        self.copy_out(None)
        self._copying.shutdown(wait=True, cancel_futures=True)
        self._inbox.take_all()
        self.remove_gone()
        if self.disk is not None:
            self.disk.leave()

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._closing.is_set()

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until everything that has left the device is where it is going: for the end, and for tests."""
        until = time.monotonic() + seconds
        while jobs := {job for job in self._jobs if not job.done()}:
            if time.monotonic() > until:
                return
            wait(jobs, timeout=max(0.0, until - time.monotonic()))
        self._jobs.clear()
        self._inbox.take_all()
        self.remove_gone()

    def remove_gone(self) -> None:
        """Remove parts that no tier holds any more."""
        for tier, names in self.tiers.take_gone():
            if self.disk is not None and tier is self.disk.tier and names:
                self._job(self.disk.remove(names))

    def _copy_unit(self, store: Store, planned: TierCopy) -> None:
        unit, layout, programs = planned.unit, self.layout, self.programs
        per_block = layout.pages_per_block
        parts: dict[Name, Part] = {}
        for at, name in enumerate(unit.blocks) if layout.kv is not None else ():
            if name in planned.change.blocks:
                kv = programs.read_piece(store, planned.pages_of(at, per_block), layout.block, layout.layers)
                parts[name] = self._copy({KV: kv}, layout.block)
        arrays = dict(programs.read_state(store, planned.slot))
        if layout.kv is not None and unit.tail:
            pages = planned.tail_pages(per_block)
            pages = pages + [0] * (per_block - len(pages))
            arrays[KV] = programs.read_piece(store, pages, unit.tail, layout.layers)
        parts[unit.name] = last = self._copy(arrays, -(-unit.tail // layout.page_size) * layout.page_size)
        size = planned.change.bytes
        last.add_done_callback(lambda part: self._inbox.post(lambda: self._copied(planned, part, size)))
        if self.memory is not None and planned.tier is self.memory.tier:
            self.memory.keep(parts)
            if not planned.memory_only:
                self._spill(self.memory, unit, parts)
        else:
            self._write(unit, planned.change, parts, spilled=False)

    def _copy(self, arrays: Mapping[str, Any], tokens: int) -> Part:
        """Arrays of the device as arrays of the host; of keys and values, the first `tokens`."""
        for array in arrays.values():
            array.copy_to_host_async()

        def copy() -> Arrays:
            found = {name: np.asarray(array) for name, array in arrays.items()}
            if KV in found and found[KV].shape[1] > tokens:
                found[KV] = np.ascontiguousarray(found[KV][:, :tokens])
            return found

        part = self._copying.submit(copy)
        self._job(part)
        return part

    def _copied(self, planned: TierCopy, part: Part, size: int) -> None:
        self.tiers.moved(size)
        if part.cancelled() or part.exception() is not None:
            log.warning("a checkpoint did not leave the device: %s", "" if part.cancelled() else part.exception())
            self.tiers.lost(TierHit(planned.tier, planned.unit))

    def _discard_copy(self, planned: TierCopy) -> None:
        self.tiers.moved(planned.change.bytes)
        if self.disk is not None and planned.tier is self.disk.tier:
            self._job(self.disk.remove(planned.change.gone))
        self.tiers.lost(TierHit(planned.tier, planned.unit))

    def _spill(self, memory: Memory, unit: Unit, parts: Mapping[Name, Part]) -> None:
        """Writes parts in memory to disk. `parts`: new ones, which memory may already have dropped."""
        blocks = unit.blocks if self.layout.kv is not None else ()
        if not memory.has_all([name for name in (*blocks, unit.name) if name not in parts]):
            return
        change = self.tiers.spill(unit)
        if change is not None:
            names = (*change.blocks, unit.name)
            self._write(unit, change, {name: parts.get(name) or memory.get(name) for name in names}, spilled=True)

    def _write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], *, spilled: bool) -> None:
        disk = self.disk
        assert disk is not None
        tier = disk.tier

        def written(error: str) -> None:
            if spilled:
                self.tiers.spilled(change.bytes)
            if error:
                self.tiers.lost(TierHit(tier, unit))
                for name in change.blocks:
                    # Other units may count on blocks that were to be written with this one.
                    if tier.has_block(name) and not disk.folder.has(name):
                        self.tiers.lost_block(tier, name)

        self._job(disk.write(unit, change, parts, lambda error: self._inbox.post(lambda: written(error))))

    def _spill_all(self, until: float) -> None:
        """Writes to disk what memory has and the disk has not, because too many writes were pending before."""
        if self.memory is None:
            return
        for unit in self.memory.tier.worth_spilling():
            self._spill(self.memory, unit, {})
            self.settle(until - time.monotonic())
            if time.monotonic() > until:
                return

    def _job(self, job: Future[Any]) -> None:
        if len(self._jobs) > 256:
            self._jobs = {job for job in self._jobs if not job.done()}
        self._jobs.add(job)
