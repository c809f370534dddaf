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
from serving.state_transfer.programs import PointPrograms
from serving.state_transfer.source import Inbox, Loop, StateSource
from serving.tiers.disk import Disk
from serving.tiers.folder import Arrays
from serving.tiers.layout import Layout
from serving.tiers.memory import Memory, Part, TierStorage, failure

log = logging.getLogger(__name__)

KV = "kv"


class TierWriter(StateSource):
    """One engine's copies from the device. `Mover` adds the way back.

    Args:
        tiers: the policy, whose books say what is where.
        layout: of the engine's store.
        programs: that take points out and put them in.
        memory: of the host tier, which replicas share; None without.
        disk: the disk tier, likewise.
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
        self._storages: dict[str, TierStorage] = {each.tier.name: each for each in (memory, disk) if each is not None}
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._inbox = inbox
        self._closing = threading.Event()
        self._jobs: set[Future[Any]] = set()
        if disk is not None:
            disk.join()
            self._sync_external()

    def copy_out(self, store: Store | None) -> None:
        """Called after a plan and before its dispatch: copies the states and pages that the plan evicted."""
        self._remove_gone()
        for planned in self.tiers.take_copies():
            if store is None or self._closing.is_set():
                self.tiers.copying -= planned.change.bytes
                self._job(self._storages[planned.tier.name].remove(planned.change.gone))
                self.tiers.lost(TierHit(planned.tier, planned.unit))
            else:
                self._copy_unit(store, planned)

    def exchange(self, loop: Loop) -> None:
        """Applies what other processes have changed on the disk, and removes parts that no tier holds any more."""
        self._sync_external()

    def close(self, loop: Loop | None = None, *, seconds: float = 60.0) -> None:
        """Ends all threads. If there is a disk, the states on the device of `loop`, which has stopped, go there first.

        Shared threads end with the last engine that uses them. `seconds`: for which files may still be written.
        """
        if self._closing.is_set():
            return
        if self.disk is not None:
            self._save(loop, self.disk, time.monotonic() + seconds)
        self._closing.set()
        self.copy_out(None)
        self._copying.shutdown(wait=True, cancel_futures=True)
        self._inbox.take_all()
        self._remove_gone()
        if self.disk is not None:
            self.disk.leave()

    def _sync_external(self) -> None:
        changes = self.disk.changes() if self.disk is not None and not self.tiers.weights_replaced else None
        if changes:
            self.tiers.sync_external(changes.gone, changes.new.values(), changes.used)
        self._remove_gone()

    def _save(self, loop: Loop | None, disk: Disk, until: float) -> None:
        """Writes what the device of a stopped loop holds to disk: the most valuable first, as far as there is time. The
        last engine writes what is left in memory."""
        if loop is not None and loop.store is not None and loop.scheduler.index is not None:
            for entry in loop.scheduler.index.by_worth():
                if time.monotonic() > until:
                    break
                self.tiers.keep(entry, low_value=False)
                self.copy_out(loop.store)
                self.settle(until - time.monotonic())
        if disk.saved() and loop is not None:
            self._spill_all(until)

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until everything that has left the device is where it is going: for the end, and for tests."""
        until = time.monotonic() + seconds
        while jobs := {job for job in self._jobs if not job.done()}:
            if time.monotonic() > until:
                return
            wait(jobs, timeout=max(0.0, until - time.monotonic()))
        self._jobs.clear()
        self._inbox.take_all()
        self._remove_gone()

    def _remove_gone(self) -> None:
        for tier, names in self.tiers.take_gone():
            if names:
                self._job(self._storages[tier.name].remove(names))

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
        last.add_done_callback(lambda part: self._inbox.post(lambda: self._copied(size, failure(part))))
        self._write(self._storages[planned.tier.name], unit, planned.change, parts)
        if not planned.memory_only:
            self._spill(unit, parts)

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

    def _copied(self, size: int, error: str) -> None:
        self.tiers.copying -= size
        if error:
            log.warning("a checkpoint did not leave the device: %s", error)

    def _spill(self, unit: Unit, parts: Mapping[Name, Part]) -> None:
        """Writes parts in memory to disk. `parts`: new ones, which memory may already have dropped."""
        memory, disk = self.memory, self.disk
        if memory is None or disk is None:
            return
        needed = (*unit.blocks, unit.name) if self.layout.kv is not None else (unit.name,)
        if not all(name in parts or memory.has(name) for name in needed):
            return
        change = self.tiers.spill(unit)
        if change is not None:
            names = (*change.blocks, unit.name)
            taken = {name: parts.get(name) or memory.get(name) for name in names}
            self._write(disk, unit, change, taken, spilled=change.bytes)

    def _write(
        self, storage: TierStorage, unit: Unit, change: Change, parts: Mapping[Name, Part], *, spilled: int = 0
    ) -> None:
        tier = storage.tier

        def written(error: str) -> None:
            self.tiers.spilling -= spilled
            if not error:
                tier.stored(change)
                return
            self.tiers.lost(TierHit(tier, unit))
            for name in change.blocks:
                # Other units may count on blocks that were to be written with this one.
                if tier.has_block(name) and not storage.has(name):
                    self.tiers.lost_block(tier, name)

        self._job(storage.write(unit, change, parts, lambda error: self._inbox.post(lambda: written(error))))

    def _spill_all(self, until: float) -> None:
        """Writes to disk what memory has and the disk has not, because too many writes were pending before."""
        if self.memory is None:
            return
        for unit in self.memory.tier.worth_spilling():
            self._spill(unit, {})
            self.settle(until - time.monotonic())
            if time.monotonic() > until:
                return

    def _job(self, job: Future[Any] | None) -> None:
        if job is None:
            return
        if len(self._jobs) > 256:
            self._jobs = {job for job in self._jobs if not job.done()}
        self._jobs.add(job)
