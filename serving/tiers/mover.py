"""Fetches checkpoints from memory and disk to the device. `tier_writer` copies them there.

What comes back is put onto the device by threads, and only then written into its slot and pages, between two steps. So
nothing here waits in the engine's thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import jax
import numpy as np

from mamba_jax.store import Store
from serving.core import RemoteLoad
from serving.core.cache.content import Name
from serving.core.tiers.tier import Unit
from serving.core.tiers.tiers import Tiers
from serving.state_transfer.programs import PointPrograms, whole
from serving.state_transfer.source import Arrival, Inbox, Loop
from serving.tiers.disk import Disk
from serving.tiers.folder import DamagedFile
from serving.tiers.layout import Layout
from serving.tiers.memory import PATIENCE, Memory, PartReader
from serving.tiers.tier_writer import KV, TierWriter

log = logging.getLogger(__name__)


class Mover(TierWriter):
    """Copies one engine's checkpoints to the tiers, and fetches them. See `TierWriter` for the arguments."""

    def __init__(
        self,
        tiers: Tiers,
        layout: Layout,
        programs: PointPrograms,
        memory: Memory | None,
        disk: Disk | None,
        inbox: Inbox,
    ) -> None:
        super().__init__(tiers, layout, programs, memory, disk, inbox)
        self._fetching = ThreadPoolExecutor(2, thread_name_prefix="tier-fetch")
        tiers.source = self

    def warm_up(self, store: Store) -> None:
        """Compiles the programs that move states, without running them."""
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

    def fetch(self, loop: Loop, load: RemoteLoad) -> None:
        """Starts to fetch the state that a request waits for."""
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

    def close(self, loop: Loop | None = None, *, seconds: float = 60.0) -> None:
        """See `TierWriter`."""
        # First: a fetch waits for copies, and is not woken where those are canceled.
        self._fetching.shutdown(wait=True, cancel_futures=True)
        super().close(loop, seconds=seconds)

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
                spec = self.layout.kv
                blocks.append((at * self.layout.block, reader.read(name, {KV: spec})[KV]))
            if kv is not None:
                blocks.append((unit.position - unit.tail, _padded(kv, self.layout.block)))
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


def _padded(kv: np.ndarray, tokens: int) -> np.ndarray:
    """Keys and values of a tail, as long as a block."""
    found = np.zeros((kv.shape[0], tokens, *kv.shape[2:]), kv.dtype)
    found[:, : kv.shape[1]] = kv
    return found
