"""The policy of all tiers together: which checkpoints leave the device, where they go, and which are fetched back.

When a checkpoint is evicted from the device, `keep` plans a copy. The engine dispatches the planned copies before its
next step: the device runs in order, so a copy is made before anything is overwritten. A request that finds a unit waits
for it as for a state of another worker (`planning.state`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.core.cache.content import Chain, Name, Scope
from serving.core.cache.prefix_tree import Checkpoint, IndexObserver
from serving.core.stats import exported
from serving.core.tiers.tier import Change, Tier, Unit

_WEIGHT = 0.2  # of the latest measurement in a running average
_FORGETTING = 1 / 64
"""By how much less a fetch is expected to take after each time that it was expected to take too long."""


@dataclass(slots=True)
class FetchCosts:
    """Decides whether fetching takes less time than computing. Both are measured while serving.

    An estimate against fetching would never be measured again. Therefore each such decision lowers it a little, until
    one fetch is tried.
    """

    per_token: float | None = None
    """Seconds per prompt token; None before the first measurement."""
    per_byte: dict[str, float] = field(default_factory=dict)
    """Seconds per byte by tier."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Records the duration of a step with this number of prompt tokens."""
        if tokens > 0 and seconds > 0:
            self.per_token = _average(self.per_token, seconds / tokens)

    def fetched(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Records the duration of a fetch of this number of bytes from a tier."""
        if num_bytes > 0 and seconds > 0:
            self.per_byte[tier] = _average(self.per_byte.get(tier), seconds / num_bytes)

    def worth_fetching(self, tier: str, num_bytes: int, tokens: int) -> bool:
        """Returns whether fetching these bytes, after those already queued, is faster than computing these tokens."""
        rate = self.per_byte.get(tier)
        if rate is None or self.per_token is None or num_bytes * rate <= tokens * self.per_token:
            return True
        self.per_byte[tier] = rate * (1 - _FORGETTING)
        return False


def _average(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)


@dataclass(frozen=True, slots=True, eq=False)
class TierHit:
    """A unit from which a request can continue, and its tier."""

    tier: Tier
    unit: Unit


@dataclass(frozen=True, slots=True, eq=False)
class TierCopy:
    """A unit to copy from the device before the next step, which may overwrite its slot and pages."""

    unit: Unit
    tier: Tier
    slot: int
    pages: list[int]
    """Pages of all its tokens; empty without attention."""
    change: Change
    memory_only: bool
    """It is not written to disk, because it is of low value, or because weights other than those at the start computed
    it."""

    def pages_of(self, at: int, pages_per_block: int) -> list[int]:
        """Pages of the block at this place in the unit."""
        return self.pages[at * pages_per_block : (at + 1) * pages_per_block]

    def tail_pages(self, pages_per_block: int) -> list[int]:
        """Pages after the last whole block."""
        return self.pages[len(self.unit.blocks) * pages_per_block :]


@dataclass(slots=True)
class FetchStats:
    """Counters of one engine's fetches from a tier."""

    hits: int = exported("tier_fetches", "Fetches started.")
    arrived: int = exported("tier_fetches_arrived", "Fetches that a request continued from.")
    hit_tokens: int = exported("tier_fetched_tokens", "Tokens that the fetched states cover.")
    dearer: int = exported("tier_fetches_dearer", "Fetches not started because computing was expected to be faster.")
    fetched_bytes: int = exported("tier_fetched_bytes", "Bytes fetched from a tier.")


class Tiers(IndexObserver):
    """Host memory, disk, or both, as one engine uses them. Replicas have one for each, over the same tiers.

    Args:
        max_copying: bytes that may be on their way off the device at once.
        only_blocks: take states after whole blocks of tokens alone: others would be rounded where no running row is.
    """

    def __init__(self, host: Tier | None, disk: Tier | None, *, max_copying: int, only_blocks: bool = False) -> None:
        tiers = [tier for tier in (host, disk) if tier is not None]
        assert tiers, "no tier at all"
        self.host, self.disk, self.fetch_costs, self.max_copying = host, disk, FetchCosts(), max_copying
        self.only_blocks = only_blocks
        self.tiers: Sequence[Tier] = tiers
        """The tiers, the fastest first."""
        self.fetches = {tier.name: FetchStats() for tier in tiers}
        """Counters by the tier's name."""
        self.source: Any = None
        """The engine's source of states that fetches from these tiers."""
        self.block = tiers[0].sizes.block
        self.copying = 0
        """Bytes being copied from the device. Who takes a copy subtracts its bytes when it has ended."""
        self.spilling = 0
        """Bytes being written from memory to disk. Who writes them subtracts them when the write has ended."""
        self.fetching = 0
        """Bytes being fetched."""
        self.weights_replaced = False
        """Then nothing is written to disk, because another process could not identify the weights."""
        self._copies: list[TierCopy] = []
        self._gone: list[tuple[Tier, list[Name]]] = []

    # -- copies from the device --

    def dropping(self, entry: Checkpoint, *, trusted: bool, low_value: bool) -> None:
        if trusted and not entry.stale:
            self.keep(entry, low_value=low_value)

    def keep(self, entry: Checkpoint, *, low_value: bool) -> None:
        """Plans the copy of a checkpoint that is complete on the device, if a tier takes it."""
        if self.only_blocks and entry.position % self.block:
            return
        unit, spare = Unit.of(entry, self.block), low_value or self.weights_replaced
        # Without one that is large enough, the first refuses it.
        tier = next((tier for tier in self.tiers if tier.sizes.unit(unit) <= tier.capacity), self.tiers[0])
        if self.weights_replaced and tier is self.disk:
            return
        # Units of low value wait until few copies are pending.
        most = self.max_copying // 2 if spare else self.max_copying
        change = tier.add(unit, spare=spare, room=most - self.copying if self.copying else None)
        if change is not None:
            self.copying += change.bytes
            pages = entry.pages if tier.sizes.page else []
            self._copies.append(TierCopy(unit, tier, entry.slot, pages, change, spare))

    def take_copies(self) -> list[TierCopy]:
        """Returns the units to copy now, before any other program is dispatched."""
        copies, self._copies = self._copies, []
        return copies

    def spill(self, unit: Unit) -> Change | None:
        """Plans to write a unit in the host's memory to disk. Returns None if the disk has it, or may not take it now.

        A unit that is evicted from memory later, or whose process is killed, is then already on disk.
        """
        disk = self.disk
        if disk is None or disk is self.tiers[0] or self.weights_replaced:
            return None
        change = disk.add(unit, room=self.max_copying - self.spilling if self.spilling else None)
        if change is not None:
            self.spilling += change.bytes
        return change

    def sync_external(self, gone: Collection[Name], new: Iterable[Unit], used: Iterable[Name]) -> None:
        """Applies the changes that other processes made on disk: removed parts, added units, and used units.

        Added units count like the process's own, so other units may be evicted for them.
        """
        disk = self.disk
        if disk is None or self.weights_replaced:
            return
        for name in gone:
            self._gone.append((disk, disk.drop_external(name)))
        for name in used:
            disk.touch(name)
        for unit in new:
            change = disk.add(unit)
            if change is not None:
                self._gone.append((disk, change.gone))

    def lost(self, held: TierHit) -> None:
        """Removes a unit that cannot be read from a tier, or was never written to it."""
        self._gone.append((held.tier, held.tier.drop(held.unit.name)))

    def lost_block(self, tier: Tier, name: Name) -> None:
        """Removes a block that cannot be read from a tier, and all units that need it."""
        self._gone.append((tier, tier.drop_block(name)))

    def outdate(self) -> None:
        """Clears the host's memory after a weight update.

        Units on disk belong to the weights at the start of the process. They stay for its next start.
        """
        self.weights_replaced = True
        self.cleared()
        if self.host is not None:
            self._gone.append((self.host, self.host.clear()))

    def clear(self) -> None:
        """Removes all units from all tiers."""
        self.cleared()
        self._gone += [(tier, tier.clear()) for tier in self.tiers]

    def forget(self, tokens: Sequence[int], scope: Scope) -> None:
        """Removes all units of these tokens from all tiers, because their states may be wrong."""
        chain = Chain(scope, self.block)
        self._gone += [(tier, tier.forget(chain, tokens)) for tier in self.tiers]

    def cleared(self) -> None:
        """Drops all planned copies, because the store is lost or outdated."""
        for planned in self.take_copies():
            self.copying -= planned.change.bytes
            self._gone.append((planned.tier, planned.change.gone))
            self.lost(TierHit(planned.tier, planned.unit))

    def take_gone(self) -> list[tuple[Tier, list[Name]]]:
        """Returns the parts to remove since the last call, in order, except those in `Change.gone`."""
        gone, self._gone = self._gone, []
        return gone

    # -- fetches --

    def find(self, chain: Chain, tokens: Sequence[int], position: int, matched: int) -> TierHit | None:
        """Returns the deepest unit beyond `position` tokens whose fetch saves time.

        `matched`: tokens whose keys and values the device has.
        """
        best: TierHit | None = None
        for tier in self.tiers:
            beyond = best.unit.position if best is not None else position
            unit = tier.find(chain, tokens, beyond)
            if unit is None:
                continue
            if self.fetch_costs.worth_fetching(tier.name, self.fetching + self.size(tier, unit, matched),
                                          unit.position - beyond):  # fmt: skip
                best = TierHit(tier, unit)
            else:
                self.fetches[tier.name].dearer += 1
        return best

    def reach(self, chain: Chain, tokens: Sequence[int], position: int) -> int:
        """Returns the number of these tokens that the deepest unit covers; `position` if none is deeper. Moves
        nothing."""
        for tier in self.tiers:
            unit = tier.find(chain, tokens, position)
            position = position if unit is None else unit.position
        return position

    def size(self, tier: Tier, unit: Unit, matched: int) -> int:
        """Returns the bytes to fetch if the device has the keys and values of this number of tokens."""
        blocks = max(0, len(unit.blocks) - matched // self.block)
        return tier.sizes.own(unit) + blocks * tier.sizes.whole_block

    def snapshot(self) -> dict[str, dict[str, float]]:
        """Returns for each tier its counters, its fill level and the estimated time of fetching."""
        return {
            tier.name: asdict(tier.stats)
            | asdict(self.fetches[tier.name])
            | {"units": len(tier), "used_bytes": tier.used, "capacity_bytes": tier.capacity}
            | {"seconds_per_byte": self.fetch_costs.per_byte.get(tier.name, 0.0)}
            for tier in self.tiers
        }

    def check(self) -> None:
        """Raises `AssertionError` unless the records of every tier are consistent."""
        for tier in self.tiers:
            tier.check()
