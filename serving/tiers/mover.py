"""Copies checkpoints from the device to memory and disk, and fetches them back, without waiting in the engine's thread.

What leaves is copied by a program that is in the device's queue before the step that writes over it; one thread reads
the copy, another one writes files. What comes back is put onto the device by threads, and written between two steps.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from mamba_jax.store import Store
from serving.core.cache.content import Name
from serving.core.requests.request import RemoteLoad
from serving.core.tiers.tier import Change, Sizes, Unit
from serving.core.tiers.tiers import TierCopy, TierHit, Tiers
from serving.state_transfer.identity import STATE_PACKAGES, source_digest
from serving.state_transfer.programs import Arrangement, PointPrograms, num_bytes, state_spec, whole
from serving.state_transfer.source import Arrival, Inbox, Loop, StateSource
from serving.tiers.folder import Arrays, DamagedFile
from serving.tiers.storage import PATIENCE, Disk, Memory, Part, PartReader, TierStorage, failure

log = logging.getLogger(__name__)

KV = "kv"
FORMAT = "mamba-jax checkpoint 1: state[layer]; kv[layer, token, K even V odd, head_dim]"
_FILE = 4096  # bytes of a file's header, at most, the names of its blocks not counted


@dataclass(frozen=True)
class Layout:
    """The arrays of one store's states, and of their keys and values, as the tiers below the device keep them."""

    arrangement: Arrangement
    state: Mapping[str, jax.ShapeDtypeStruct]  # a state's arrays by name, as the model defines them
    kv: jax.ShapeDtypeStruct | None
    """Keys and values of a whole block, of all layers: [layer, B, ...]; None without attention."""
    page_size: int
    block: int  # B, in tokens

    @classmethod
    def of(cls, arrangement: Arrangement, store: Store, block: int) -> Layout:
        """Returns the layout of a running engine's store. `block`: B."""
        kv = None
        if store.kv:
            shape = (len(store.kv), block, *arrangement.kv_shape)
            kv = jax.ShapeDtypeStruct(shape, store.kv[0].dtype)
        return cls(arrangement, state_spec(store, arrangement), kv, store.page_size or block, block)

    @property
    def layers(self) -> int:
        """Layers that have keys and values."""
        return self.kv.shape[0] if self.kv is not None else 0

    @property
    def pages_per_block(self) -> int:
        """Pages that a block fills."""
        return self.block // self.page_size

    def sizes(self, *, in_files: bool) -> Sizes:
        """Returns the bytes of each kind of part; with `in_files`, of its file."""
        state = num_bytes(self.state.values())
        page = num_bytes([self.kv]) // self.pages_per_block if self.kv is not None else 0
        return Sizes(state, page, self.page_size, self.block, _FILE if in_files else 0)

    def fingerprint(self, model: str) -> str:
        """Returns a digest that is equal if a process can continue from states that another one wrote. A release that
        computes or reads weights differently has another one. `model`: a digest of its weights."""
        state = [(name, spec.shape, str(spec.dtype)) for name, spec in self.state.items()]
        kv = None if self.kv is None else (self.kv.shape, str(self.kv.dtype))
        text = repr((FORMAT, model, source_digest(STATE_PACKAGES), state, kv, self.page_size, self.block))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


class Mover(StateSource):
    """Moves the checkpoints of one engine, which owns the inbox and has stores of this layout. `memory` and `disk` are
    shared by replicas; `tiers` is the policy, whose books say what is where."""

    def __init__(
        self, tiers: Tiers, layout: Layout, programs: PointPrograms, memory: Memory | None, disk: Disk | None,
        inbox: Inbox,
    ) -> None:  # fmt: skip
        self.tiers, self.layout, self.programs, self.memory, self.disk = tiers, layout, programs, memory, disk
        self._storages: dict[str, TierStorage] = {each.tier.name: each for each in (memory, disk) if each is not None}
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._fetching = ThreadPoolExecutor(2, thread_name_prefix="tier-fetch")
        tiers.source = self
        self._inbox = inbox
        self._closing = threading.Event()
        self._jobs: set[Future[Any]] = set()
        if disk is not None:
            disk.join()
            self.exchange()

    def warm_up(self, store: Store) -> None:
        layout = self.layout
        for reading in (True, False):
            self.programs.warm_up(
                store, unit=layout.page_size, layers=layout.layers, reading=reading, sizes=(layout.pages_per_block,)
            )

    def copy_out(self, store: Store | None) -> None:
        self._remove_gone()
        for planned in self.tiers.take_copies():
            if store is None or self._closing.is_set():
                self.tiers.copying -= planned.change.bytes
                self._job(self._storages[planned.tier.name].remove(planned.change.gone))
                self.tiers.lost(TierHit(planned.tier, planned.unit))
            else:
                self._copy_unit(store, planned)

    def exchange(self, loop: Loop | None = None) -> None:
        """Applies what other processes have changed on the disk, and removes parts that no tier holds any more."""
        changes = self.disk.changes() if self.disk is not None and not self.tiers.weights_replaced else None
        if changes:
            self.tiers.sync_external(changes.gone, changes.new.values(), changes.used)
        self._remove_gone()

    def close(self, loop: Loop | None = None, *, seconds: float = 60.0) -> None:
        """Ends all threads. If there is a disk, the states on the device of `loop`, which has stopped, go there first.

        Shared threads end with the last engine that uses them. `seconds`: for which files may still be written.
        """
        # First: a fetch waits for copies, and is not woken where those are canceled.
        self._fetching.shutdown(wait=True, cancel_futures=True)
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

    def _save(self, loop: Loop | None, disk: Disk, until: float) -> None:
        """Writes what the device of a stopped loop holds to disk: the most valuable first, until time runs out. The
        last engine writes what is left in memory."""
        if loop is not None and loop.store is not None and loop.scheduler.index is not None:
            for entry in loop.scheduler.index.by_worth():
                if time.monotonic() > until:
                    break
                self.tiers.keep(entry, low_value=False)
                self.copy_out(loop.store)
                self.settle(until - time.monotonic())
        if disk.saved() and loop is not None and self.memory is not None:
            # What the disk does not have, because too many writes were pending before.
            for unit in self.memory.tier.worth_spilling():
                if time.monotonic() > until:
                    return
                self._spill(unit, {})
                self.settle(until - time.monotonic())

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until everything that has left the device is where it is going: for the end, and for tests."""
        if wait(self._jobs, timeout=max(0.0, seconds)).not_done:
            return
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
            log.warning("a checkpoint could not be copied from the device: %s", error)

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
                if tier.holds(name) and not storage.has(name):
                    self.tiers.lost_block(tier, name)

        self._job(storage.write(unit, change, parts, lambda error: self._inbox.post(lambda: written(error))))

    def _job(self, job: Future[Any] | None) -> None:
        if job is None:
            return
        if len(self._jobs) > 256:
            self._jobs = {job for job in self._jobs if not job.done()}
        self._jobs.add(job)

    # -- fetches --

    def fetch(self, loop: Loop, load: RemoteLoad) -> None:
        held, store = load.remote.held, loop.store
        assert held is not None
        unit, tier, layout = held.unit, held.tier, self.layout
        first = load.start // layout.block if load.pages else len(unit.blocks)
        wanted = dict(enumerate(unit.blocks[first:], first))
        size = tier.sizes.own(unit) + len(wanted) * tier.sizes.whole_block
        self.tiers.fetches[tier.name].hits += 1
        tier.touch(unit.name)
        self.tiers.fetching += size
        self._inbox.awaited += 1
        reader = self._storages[tier.name].reader([*wanted.values(), unit.name])
        sharding = whole(store) if store is not None else None  # lost: it is made again where it was
        self._fetching.submit(self._fetch, loop, Arrival(load, size), wanted, reader, sharding)

    def _fetch(
        self, loop: Loop, arrival: Arrival, wanted: Mapping[int, Name], reader: PartReader, sharding: Any
    ) -> None:
        wait(reader.coming, timeout=PATIENCE)  # other engines may be writing it
        assert arrival.load.remote.held is not None
        unit, begin = arrival.load.remote.held.unit, time.perf_counter()
        name = unit.name
        try:
            own = reader.read(name, self._own_spec(unit))
            kv = own.pop(KV, None)
            blocks = []
            for at, name in wanted.items():
                blocks.append((at * self.layout.block, reader.read(name, {KV: self.layout.kv})[KV]))
            if kv is not None:
                # Keys and values of a tail, as long as a block.
                widths = [(0, 0), (0, self.layout.block - kv.shape[1]), *[(0, 0)] * (kv.ndim - 2)]
                blocks.append((unit.position - unit.tail, np.pad(kv, widths)))
            arrays = (own, [kv for _, kv in blocks])
            state, pieces = jax.block_until_ready(jax.device_put(arrays, sharding))
            arrival.pieces = [(at, kv) for (at, _), kv in zip(blocks, pieces, strict=True)]
            arrival.state = state
        except Exception as error:  # any failure: a request waits for the answer
            arrival.state = None
            arrival.error = f"{type(error).__name__}: {error}"
            arrival.damaged = name if name != unit.name and isinstance(error, DamagedFile | OSError) else None
        arrival.seconds = time.perf_counter() - begin
        self._inbox.post(lambda: self._take(loop, arrival))

    def _own_spec(self, unit: Unit) -> dict[str, Any]:
        spec: dict[str, Any] = dict(self.layout.state)
        if self.layout.kv is not None and unit.tail:
            layers, _, *rest = self.layout.kv.shape
            tokens = -(-unit.tail // self.layout.page_size) * self.layout.page_size
            spec[KV] = jax.ShapeDtypeStruct((layers, tokens, *rest), self.layout.kv.dtype)
        return spec

    def _take(self, loop: Loop, arrival: Arrival) -> None:
        self._inbox.awaited -= 1
        self.tiers.fetching -= arrival.bytes
        load, held = arrival.load, arrival.load.remote.held
        assert held is not None
        stats = self.tiers.fetches[held.tier.name]
        if arrival.state is None:
            log.warning("a checkpoint of the %s cache could not be read: %s", held.tier.name, arrival.error)
            if arrival.damaged is not None:
                self.tiers.lost_block(held.tier, arrival.damaged)
            self.tiers.lost(held)
            loop.scheduler.lost(load)
            return
        self.tiers.fetch_costs.fetched(held.tier.name, arrival.bytes, arrival.seconds)
        stats.fetched_bytes += arrival.bytes
        if load.valid:
            arrival.write(loop, self.programs, self.layout.page_size)
            stats.arrived += 1
            stats.hit_tokens += load.position
