"""The contents of one tier and its evictions: a ledger of bytes by content, without the bytes.

A unit is one state with all keys and values that it needs: without either it is worth nothing. Blocks of keys and
values are shared by the units whose sequences begin alike, and go with the last of them. So a unit is always whole.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from serving.core.cache.content import Chain, Name, NamedStates, State, count_down, state_name
from serving.core.cache.eviction_queue import EvictionQueue
from serving.core.cache.prefix_tree import Checkpoint, CheckpointKind
from serving.core.cache.retention import EvictionRank
from serving.core.stats import exported
from serving.core.tiers.journal import Journal


class Unit(NamedTuple):
    """A state below the device, with the keys and values of its tokens."""

    name: Name
    """Name of the state with the keys and values of its tail."""
    links: tuple[Name, ...]
    """The chain up to it: the scope's link, then one for each whole block, which also name the blocks' keys and
    values."""
    tail: int
    """Tokens after the last whole block."""
    position: int
    """Number of all its tokens."""
    kind: CheckpointKind
    client: str | None = None
    """The client whose request published it."""

    @classmethod
    def of(cls, entry: Checkpoint, block: int) -> "Unit":
        """The unit of a checkpoint on the device."""
        name, _, tail, position = entry.state
        return cls(name, tuple(entry.links[: position // block + 1]), tail, position, entry.kind, entry.client)

    @property
    def blocks(self) -> tuple[Name, ...]:
        """Names of the whole blocks."""
        return self.links[1:]

    @property
    def state(self) -> State:
        """The state's name without its path."""
        return State(self.name, self.links[-1], self.tail, self.position)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of all parts in the tier."""

    state: int
    page: int
    """Bytes of one page's keys and values; 0 for a model without attention."""
    page_size: int
    block: int
    """B, in tokens."""
    overhead: int = 0
    """Bytes of one part in addition to its arrays: the header of a file."""

    @property
    def whole_block(self) -> int:
        """Bytes of a whole block's keys and values."""
        return self.block // self.page_size * self.page + self.overhead if self.page else 0

    def own(self, unit: Unit) -> int:
        """Bytes of the part that no other unit shares: the state, and its tail's keys and values."""
        tail = -(-unit.tail // self.page_size) * self.page if self.page else 0
        names = (2 * len(unit.name) + 1) * len(unit.links) if self.overhead else 0
        return self.state + tail + self.overhead + names

    def unit(self, unit: Unit) -> int:
        """Bytes of the whole unit."""
        return self.own(unit) + len(unit.blocks) * self.whole_block


class Change(NamedTuple):
    """The changes that adding a unit makes."""

    blocks: list[Name]
    """Blocks that the tier did not have. The unit's own part is always new."""
    gone: list[Name]
    """Own parts and blocks to remove, units before the blocks that they need."""
    bytes: int
    """Bytes of the unit's own part and its new blocks."""


@dataclass(slots=True)
class TierStats:
    """Parts that were added to a tier, and removed."""

    stored: int = exported("tier_stored", "Checkpoints stored in a tier.")
    evicted: int = exported("tier_evicted", "Checkpoints evicted from a tier.")
    lost: int = exported("tier_lost", "Checkpoints that were damaged, or could not be written or read.")
    not_kept: int = exported("tier_not_kept", "Checkpoints rejected: too large, or too many transfers pending.")
    stored_bytes: int = exported("tier_stored_bytes", "Bytes stored in a tier.")


@dataclass(slots=True)
class Tier:
    """One tier. It evicts from the client that holds most (`EvictionQueue`) units of low value first, and within a
    class the least recently used. A block counts for the client whose unit brought it.

    Engines that share it may use it at once, each in a thread of its own.
    """

    name: str
    capacity: int
    """Bytes."""
    sizes: Sizes
    stats: TierStats = field(default_factory=TierStats)
    units: dict[Name, Unit] = field(default_factory=dict)
    _blocks: Counter[Name] = field(default_factory=Counter)
    """Numbers of units that need a block."""
    _names: NamedStates = field(default_factory=NamedStates)
    _brought: dict[Name, str | None] = field(default_factory=dict)
    """The client for which a block counts."""
    _stamps: dict[Name, int] = field(default_factory=dict)
    """Places of units in the queue, the least recently used first."""
    _spare: set[Name] = field(default_factory=set)
    """Units of low value."""
    _queue: EvictionQueue[Name] = field(init=False, repr=False)
    journal: Journal | None = None
    """Called with every unit that is added or removed."""
    dropped: Callable[[Name], None] | None = None
    """Called immediately with every part that is removed."""
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)
    """Protects the tier's contents. Holders must not wait for anything else."""

    def __post_init__(self) -> None:
        self._queue = EvictionQueue(self._stamps.get)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def used(self) -> int:
        """Bytes of all parts."""
        with self.lock:
            return self._queue.total

    def holds(self, name: Name) -> bool:
        """Returns whether the tier has a part: a block's keys and values, or a unit's own."""
        return name in self.units or name in self._blocks

    def find(self, chain: Chain, tokens: Sequence[int], beyond: int) -> Unit | None:
        """Returns the deepest unit of a prefix of these tokens that is longer than `beyond`.

        Its number of tokens is computed from `tokens` alone, and not read from what was stored.
        """
        links = chain.reach(tokens)  # hashing many tokens takes time: other threads can run
        with self.lock:
            for state in self._names.candidates(chain, tokens, beyond):
                known = self.units.get(state.name)
                if known is not None:
                    path = tuple(links[: state.position // chain.block + 1])
                    return known._replace(links=path, tail=state.tail, position=state.position)
        return None

    def add(self, unit: Unit, *, spare: bool = False, room: int | None = None) -> Change | None:
        """Adds a unit. Returns None if the tier has it already, or if it is larger than the tier.

        `spare`: it is of low value, and is evicted before all others. `stored` counts it once its parts are written.
        `room`: bytes of new parts at most; None: any number.
        """
        with self.lock:
            if unit.name in self.units:
                self.touch(unit.name, spare=spare)
                return None
            blocks = unit.blocks if self.sizes.page else ()
            new = [name for name in blocks if name not in self._blocks]
            size = self.sizes.own(unit) + len(new) * self.sizes.whole_block
            if self.sizes.unit(unit) > self.capacity or (room is not None and size > room):
                self.refuse()
                return None
            self._brought |= dict.fromkeys(new, unit.client)
            self._blocks.update(blocks)
            self.units[unit.name] = unit
            self._queue.hold(unit.client, size)
            self._names.add(unit.state)
            gone: list[Name] = []
            while self.used > self.capacity:
                least = self._queue.pop()
                assert least is not None
                self.stats.evicted += 1
                gone += self._remove(least)
            if spare:
                self._spare.add(unit.name)
            self._used(unit.name)
            if self.journal is not None:
                self.journal.stored(self.name, unit.state)
            return Change(new, gone, size)

    def stored(self, change: Change) -> None:
        """Counts a unit that was added, and whose parts have been written."""
        with self.lock:
            self.stats.stored += 1
            self.stats.stored_bytes += change.bytes

    def refuse(self) -> None:
        """Counts a refused unit."""
        with self.lock:
            self.stats.not_kept += 1

    def touch(self, name: Name, *, spare: bool = False) -> None:
        """Records that a unit was used, or evicted from the device again."""
        with self.lock:
            if not spare:
                self._spare.discard(name)
            if name in self.units:
                self._used(name)

    def _used(self, name: Name) -> None:
        rank = EvictionRank.INTERIOR if name in self._spare else EvictionRank.VALUABLE
        client = self.units[name].client
        self._stamps.pop(name, None)
        self._queue.use(client)
        self._stamps[name] = self._queue.push(client, (rank,), name)

    def worth_spilling(self) -> list[Unit]:
        """Returns the units that may also be written to a slower tier, the last used first."""
        with self.lock:
            return [self.units[name] for name in reversed(self._stamps) if name not in self._spare]

    def drop(self, name: Name) -> list[Name]:
        """Removes a unit that is damaged or must not be used. Returns the removed parts."""
        with self.lock:
            if name not in self.units:
                return []
            self.stats.lost += 1
            return self._remove(name)

    def drop_external(self, name: Name) -> list[Name]:
        """Removes a unit or a block that another process has removed. Returns the units that need it.

        Blocks are not returned: that process has also removed the blocks that no other unit needs.
        """
        with self.lock:
            if name in self.units:
                self.stats.evicted += 1
                self._remove(name)
                return []
            found = [unit.name for unit in self.units.values() if name in unit.blocks] if name in self._blocks else []
            for each in found:
                self.stats.evicted += 1
                self._remove(each)
            return found

    def drop_block(self, name: Name) -> list[Name]:
        """Removes a damaged block and all units that need it. Returns the removed parts."""
        with self.lock:
            return [gone for unit in [unit for unit in self.units.values() if name in unit.blocks]
                    for gone in self.drop(unit.name)]  # fmt: skip

    def forget(self, chain: Chain, tokens: Sequence[int]) -> list[Name]:
        """Removes all units that share the first block with these tokens, or less."""
        with self.lock:
            links = chain.reach(tokens)
            first = links[1] if len(links) > 1 else None
            short = {state_name(links[0], tokens[:length]) for length in range(1, min(len(tokens) + 1, chain.block))}
            found = [
                name for name, unit in self.units.items()
                if name in short or (first is not None and first in unit.links[1:2])
            ]  # fmt: skip
            return [gone for name in found for gone in self.drop(name)]

    def clear(self) -> list[Name]:
        """Removes all units. Returns the removed parts."""
        with self.lock:
            return [gone for name in list(self.units) for gone in self.drop(name)]

    def _remove(self, name: Name) -> list[Name]:
        unit = self.units.pop(name)
        if self.journal is not None:
            self.journal.evicted(self.name, name)
        del self._stamps[name]
        self._spare.discard(name)
        self._queue.hold(unit.client, -self.sizes.own(unit))
        self._names.remove(unit.state)
        gone = [name]
        for each in unit.blocks if self.sizes.page else ():
            count_down(self._blocks, each)
            if each not in self._blocks:
                self._queue.hold(self._brought.pop(each), -self.sizes.whole_block)
                gone.append(each)
        dropped = self.dropped
        if dropped is not None:
            for each in gone:
                dropped(each)
        return gone

    def check(self) -> None:
        """Raises `AssertionError` unless every byte is accounted for and every unit is complete."""
        with self.lock:
            counts = Counter(name for unit in self.units.values() for name in unit.blocks if self.sizes.page)
            assert self._blocks == counts, "blocks leaked, or are missing"
            held: Counter[str | None] = Counter()
            for unit in self.units.values():
                held[unit.client] += self.sizes.own(unit)
            for name in counts:
                held[self._brought[name]] += self.sizes.whole_block
            assert self._queue.held == held, "bytes leaked"
            assert self._queue.total == held.total(), "the sum of bytes is wrong"
            assert len(self._brought) == len(counts), "blocks count for a client after they went"
            assert self.used <= self.capacity, "more is held than there is room for"
            assert self._stamps.keys() == self.units.keys() >= self._spare, "a unit is in no order"
            assert len(self._names) == len(self.units), "names leaked"
