"""Moves what the policy says: copies out of the store before a step, to the disk behind it, and back for who waits.

Nothing here waits for the device or the disk in the engine's thread. What leaves is copied by a program that is in the
device's queue before the step that writes over it; a thread reads the copy, another one writes files. What comes back
is put onto the device by threads, and only then written into its slot and pages, between two steps.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np

from mamba_jax.store import Store
from serving.core import RemoteLoad, Scheduler
from serving.core.tiers.content import Name
from serving.core.tiers.tier import Change, Unit
from serving.core.tiers.tiers import Departure, Held, Tiers
from serving.points.point import PointPrograms, whole
from serving.tiers.folder import Arrays, Damaged, Folder
from serving.tiers.layout import Layout

log = logging.getLogger(__name__)

_PATIENCE = 0.002
"""Seconds that an idle engine waits for an arrival before it looks again."""
_PAUSE = 30.0
"""Seconds for which nothing is written to a disk that has refused a file."""
KV = "kv"

Part = Future[Arrays]


class Loop(Protocol):
    """What is needed of the step loop."""

    scheduler: Scheduler

    @property
    def store(self) -> Store | None:
        """As it is now."""
        ...

    @property
    def in_flight(self) -> bool:
        """Whether a step has been dispatched and not yet settled."""
        ...

    def replace_store(self, change: Callable[[Store], Store]) -> None:
        """Dispatch a program over the store that no step knows of."""
        ...


@dataclass(eq=False)
class _Arrival:
    """What a request has waited for; or why it does not come."""

    load: RemoteLoad
    held: Held
    bytes: int
    state: dict[str, Any] | None = None
    blocks: list[tuple[int, Any]] = field(default_factory=list)
    """(first token, keys and values of a block)."""
    seconds: float = 0.0
    error: str = ""
    damaged: Name | None = None
    """The block that was, if it was one."""


class Mover:
    """Belongs to one engine.

    Args:
        tiers: the policy, whose books say what is where.
        layout: of the engine's store.
        programs: that take points out and put them in.
        folder: of the disk tier.
    """

    def __init__(self, tiers: Tiers, layout: Layout, programs: PointPrograms, folder: Folder | None) -> None:
        self.tiers, self.layout, self.programs, self.folder = tiers, layout, programs, folder
        self._parts: dict[Name, Part] = {}
        """Of the host's memory. Changed by the engine's thread alone."""
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="tier-copy")
        self._writing = ThreadPoolExecutor(1, thread_name_prefix="tier-write")
        self._fetching = ThreadPoolExecutor(2, thread_name_prefix="tier-fetch")
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What other threads have to tell the engine's."""
        self._arrivals: queue.SimpleQueue[_Arrival] = queue.SimpleQueue()
        self._under_way = 0
        self._pause_until = 0.0
        self._closing = threading.Event()
        self._jobs: set[Future[Any]] = set()
        if folder is not None:
            self._take_stock(folder)

    def _take_stock(self, folder: Folder) -> None:
        """What an earlier process has left on the disk."""
        disk = self.tiers.disk
        assert disk is not None
        for unit in folder.scan(self.layout.block, with_blocks=self.layout.kv is not None):
            disk.add(unit)
        disk.stats.stored = disk.stats.evicted = 0
        folder.keep_only(name for unit in disk.units.values() for name in (unit.name, *unit.blocks))
        if disk.units:
            log.info("disk cache: %d checkpoints found in %s", len(disk), folder.path)

    def warm_up(self, store: Store) -> None:
        """Compile what moving needs; nothing is run."""
        sizes = (self.layout.pages_per_block,)
        for reading in (True, False):
            self.programs.warm_up(
                store,
                unit=self.layout.page_size,
                layers=self.layout.layers,
                reading=reading,
                state=dict(self.layout.state),
                sizes=sizes,
            )

    # -- of the loop, in the engine's thread --

    def copy_out(self, store: Store | None) -> None:
        """After a plan and before anything else is dispatched: copy what it has evicted."""
        self._remove_gone()
        for departure in self.tiers.take_departures():
            if store is None or self._closing.is_set():
                self._never_came(departure)
            else:
                self._depart(store, departure)

    def exchange(self, loop: Loop) -> None:
        """Before a step is planned, and once more after: begin what is newly waited for, take in what has come."""
        for load in loop.scheduler.take_fetches():
            if load.valid:
                self._begin(loop, load)
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            event()
        patience = _PATIENCE if self._under_way and not loop.in_flight else 0.0
        while True:
            try:
                arrival = self._arrivals.get(block=patience > 0, timeout=patience or None)
            except queue.Empty:
                break
            patience = 0.0
            self._under_way -= 1
            self.tiers.fetching -= arrival.bytes
            self._take(loop, arrival)
        self._remove_gone()

    def close(self, loop: Loop | None = None, *, seconds: float = 60.0) -> None:
        """End all threads. With a loop that has stopped, what its device holds goes to the disk first, if there is one.

        seconds: for which files may still be written.
        """
        if self._closing.is_set():
            return
        until = time.monotonic() + seconds
        if loop is not None and loop.store is not None and self.folder is not None:
            self._save_all(loop, until)
        self._closing.set()
        for executor in (self._fetching, self._copying, self._writing):
            executor.shutdown(wait=True, cancel_futures=True)

    def settle(self, seconds: float = 60.0) -> None:
        """Wait until everything that has left the device is where it is going: for the end, and for tests."""
        until = time.monotonic() + seconds
        while jobs := {job for job in self._jobs if not job.done()}:
            if time.monotonic() > until:
                return
            wait(jobs, timeout=max(0.0, until - time.monotonic()))
        self._jobs.clear()
        while True:
            try:
                self._events.get_nowait()()
            except queue.Empty:
                break
        self._remove_gone()

    # -- away --

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
                self._parts.pop(name, None)
            self._parts.update(parts)
            change = self.tiers.spill(unit) if not departure.memory_only else None
            if change is not None:
                needed = {name: self._parts[name] for name in (*change.blocks, unit.name)}
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
                self._parts.pop(name, None)
        elif self.folder is not None:
            self._job(self._writing, self.folder.remove, departure.change.gone)
        self.tiers.lost(Held(departure.tier, departure.unit))

    def _write(self, unit: Unit, change: Change, parts: Mapping[Name, Part], *, spilled: bool) -> None:
        disk, folder = self.tiers.disk, self.folder
        assert disk is not None
        assert folder is not None

        def write() -> None:
            error = ""
            folder.remove(change.gone)
            try:
                if time.monotonic() < self._pause_until:
                    raise OSError("the disk has refused a file lately")
                for name in (*change.blocks, unit.name):
                    folder.write(name, parts[name].result(), unit if name == unit.name else None)
            except Exception as problem:  # whatever it is, the books must say that the unit is not there
                if not isinstance(problem, OSError) or time.monotonic() >= self._pause_until:
                    log.warning("the disk cache does not take a checkpoint: %s", problem)
                    self._pause_until = time.monotonic() + _PAUSE
                error = str(problem) or type(problem).__name__
            self._events.put(lambda: written(error))

        def written(error: str) -> None:
            if spilled:
                self.tiers.spilled(change.bytes)
            if error:
                self.tiers.lost(Held(disk, unit))
                for name in change.blocks:
                    # Other units may count on blocks that were to be written with this one.
                    if disk.has_block(name) and not folder.has(name):
                        self.tiers.lost_block(disk, name)

        self._job(self._writing, write)

    def _remove_gone(self) -> None:
        for tier, names in self.tiers.take_gone():
            if tier is self.tiers.host:
                for name in names:
                    self._parts.pop(name, None)
            elif self.folder is not None and names and not self._closing.is_set():
                self._job(self._writing, self.folder.remove, names)

    def _save_all(self, loop: Loop, until: float) -> None:
        """The most valuable first, as far as there is time."""
        index = loop.scheduler.index
        for entry in index.by_worth() if index is not None else ():
            if time.monotonic() > until:
                return
            self.tiers.left(entry, False)
            self.copy_out(loop.store)
            self.settle(until - time.monotonic())
        self._spill_all(until)

    def _spill_all(self, until: float) -> None:
        """What memory has and the disk has not, because too much was on its way at the time."""
        host = self.tiers.host
        for unit in host.worth_spilling() if host is not None else ():
            change = self.tiers.spill(unit)
            if change is not None:
                parts = {name: self._parts[name] for name in (*change.blocks, unit.name)}
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

    # -- back --

    def _begin(self, loop: Loop, load: RemoteLoad) -> None:
        held, store = load.remote.held, loop.store
        assert held is not None
        unit, tier, layout = held.unit, held.tier, self.layout
        first = load.start // layout.block if layout.kv is not None else len(unit.blocks)
        if not load.pages:
            first = len(unit.blocks)
        wanted = dict(enumerate(unit.blocks[first:], first)) if layout.kv is not None else {}
        size = tier.sizes.own(unit) + len(wanted) * tier.sizes.whole_block
        tier.stats.hits += 1
        tier.touch(unit.name)
        self.tiers.fetching += size
        self._under_way += 1
        known = (
            {name: self._parts.get(name) for name in (*wanted.values(), unit.name)} if tier is self.tiers.host else None
        )
        sharding = whole(store) if store is not None else None  # lost: it is made again where it was
        self._fetching.submit(self._fetch, _Arrival(load, held, size), wanted, known, sharding)

    def _fetch(
        self, arrival: _Arrival, wanted: Mapping[int, Name], known: Mapping[Name, Part | None] | None, sharding: Any
    ) -> None:
        unit, begin = arrival.held.unit, time.perf_counter()
        name = unit.name
        try:
            if known is not None:
                waiting = [part for part in known.values() if part is not None]
                wait(waiting)
                begin = time.perf_counter()
            own = self._part(name, known, self._own_spec(unit))
            kv = own.pop(KV, None)
            blocks = []
            for at, name in wanted.items():
                spec = self.layout.kv
                blocks.append((at * self.layout.block, self._part(name, known, {KV: spec})[KV]))
            if kv is not None:
                blocks.append((unit.position - unit.tail, _padded(kv, self.layout.block)))
            arrays = (own, [kv for _, kv in blocks])
            state, found = jax.block_until_ready(jax.device_put(arrays, sharding))
            arrival.blocks = [(at, kv) for (at, _), kv in zip(blocks, found, strict=True)]
            arrival.state = state
            if self.folder is not None and known is None:
                for name in (*wanted.values(), unit.name):
                    self.folder.used(name)
        except Exception as error:  # whatever it is, the request must not wait for ever
            arrival.state = None
            arrival.error = f"{type(error).__name__}: {error}"
            arrival.damaged = name if name != unit.name and isinstance(error, Damaged | OSError) else None
        arrival.seconds = time.perf_counter() - begin
        self._arrivals.put(arrival)

    def _own_spec(self, unit: Unit) -> dict[str, Any]:
        spec: dict[str, Any] = dict(self.layout.state)
        if self.layout.kv is not None and unit.tail:
            layers, _, *rest = self.layout.kv.shape
            tokens = -(-unit.tail // self.layout.page_size) * self.layout.page_size
            spec[KV] = jax.ShapeDtypeStruct((layers, tokens, *rest), self.layout.kv.dtype)
        return spec

    def _part(self, name: Name, known: Mapping[Name, Part | None] | None, spec: Mapping[str, Any]) -> Arrays:
        if known is None:
            assert self.folder is not None
            return self.folder.read(name, spec)
        part = known[name]
        if part is None:
            raise KeyError("it is not in memory any more")
        return dict(part.result())

    def _take(self, loop: Loop, arrival: _Arrival) -> None:
        load, held, state = arrival.load, arrival.held, arrival.state
        stats = held.tier.stats
        if state is None:
            log.warning("a checkpoint of the %s cache cannot be had: %s", held.tier.name, arrival.error)
            if arrival.damaged is not None:
                self.tiers.lost_block(held.tier, arrival.damaged)
            self.tiers.lost(held)
            if load.valid:
                loop.scheduler.lost(load)
            return
        self.tiers.prices.fetched(held.tier.name, arrival.bytes, arrival.seconds)
        stats.fetched_bytes += arrival.bytes
        if not load.valid:
            return
        programs, page_size, found = self.programs, self.layout.page_size, state
        loop.replace_store(lambda store: programs.write_state(store, load.slot, found, load.position))
        for start, kv in arrival.blocks:
            first = (start - load.start) // page_size
            table = [
                load.pages[at] if 0 <= at < len(load.pages) else 0
                for at in range(first, first + self.layout.pages_per_block)
            ]
            if any(table):
                loop.replace_store(partial(programs.write_piece, pages=table, piece=kv))
        stats.arrived += 1
        stats.hit_tokens += load.position
        loop.scheduler.arrived(load)


def _padded(kv: np.ndarray, tokens: int) -> np.ndarray:
    """Keys and values of a tail, as long as a block."""
    found = np.zeros((kv.shape[0], tokens, *kv.shape[2:]), kv.dtype)
    found[:, : kv.shape[1]] = kv
    return found
