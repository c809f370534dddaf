"""The policy of all tiers together: which checkpoints leave the device, where they go, and which are fetched back.

An eviction takes a checkpoint from the prefix index while its slot and pages still hold it. `left` records it as a
departure. Before the next step is dispatched, the engine takes the departures and dispatches a copy: the device runs in
order, so the copy is made before anything is overwritten. A request that finds a unit waits for it as for a state of
another worker (`planning.remote`).
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass

from serving.core.cache.prefix_tree import Checkpoint, Node, Root, Scope
from serving.core.tiers.content import Chain, Name
from serving.core.tiers.naming import scope_of, unit_of
from serving.core.tiers.prices import Prices
from serving.core.tiers.tier import Change, Tier, Unit


@dataclass(frozen=True, slots=True, eq=False)
class TierHit:
    """A unit that a request may go on from, and the tier to fetch it from."""

    tier: Tier
    unit: Unit


@dataclass(frozen=True, slots=True, eq=False)
class Departure:
    """A unit to copy from the device before the next step, which may overwrite its slot and pages."""

    unit: Unit
    tier: Tier
    slot: int
    pages: list[int]
    """Of all its tokens; empty without attention."""
    change: Change
    memory_only: bool
    """The disk is not to have it: it is worth little, or other weights computed it than the process began with."""

    def pages_of(self, at: int, pages_per_block: int) -> list[int]:
        """Those of the block at this place in the unit."""
        return self.pages[at * pages_per_block : (at + 1) * pages_per_block]

    def tail_pages(self, pages_per_block: int) -> list[int]:
        """Those behind the last whole block."""
        return self.pages[len(self.unit.blocks) * pages_per_block :]


@dataclass(slots=True)
class FetchStats:
    """What one engine has had from a tier."""

    hits: int = 0
    """Fetches that were begun."""
    arrived: int = 0
    """Fetches that a request went on from."""
    hit_tokens: int = 0
    """Tokens that those states had absorbed."""
    dearer: int = 0
    """Times that computing was expected to take less time than fetching."""
    fetched_bytes: int = 0


class Tiers:
    """Host memory, disk, or both, as one engine uses them. Replicas have one for each, over the same tiers.

    Args:
        max_leaving: bytes that may be on their way off the device at once.
        only_blocks: take states after whole blocks of tokens alone: others would be rounded where no running row is.
    """

    def __init__(
        self, host: Tier | None, disk: Tier | None, *, prices: Prices, max_leaving: int, only_blocks: bool = False
    ) -> None:
        tiers = [tier for tier in (host, disk) if tier is not None]
        assert tiers, "no tier at all"
        self.host, self.disk, self.prices, self.max_leaving = host, disk, prices, max_leaving
        self.only_blocks = only_blocks
        self.tiers: Sequence[Tier] = tiers
        """The fastest first."""
        self.fetches = {tier.name: FetchStats() for tier in tiers}
        """By the tier's name."""
        self.block = tiers[0].sizes.block
        self.leaving = 0
        """Bytes on their way off the device."""
        self.spilling = 0
        """Bytes on their way from memory to the disk."""
        self.fetching = 0
        """Bytes on their way back."""
        self.weights_replaced = False
        """From then on nothing goes to the disk: how often they were means nothing to another process."""
        self._departures: list[Departure] = []
        self._gone: list[tuple[Tier, list[Name]]] = []

    # -- away from the device --

    def left(self, entry: Checkpoint, spare: bool) -> None:
        """The index is about to drop a checkpoint that lies whole on the device. `spare`: one of little worth."""
        replaced = scope_of(entry).weights > 0
        if entry.stale or (self.only_blocks and entry.position % self.block):
            return
        unit = unit_of(entry, self.block)
        fitting = [tier for tier in self.tiers if tier.sizes.unit(unit) <= tier.capacity]
        if not fitting:
            self.tiers[0].refuse()
            return
        first, spare = fitting[0], spare or replaced
        if replaced and first is self.disk:
            return
        if unit.name in first.units:
            first.touch(unit.name, spare=spare)
            return
        sizes = first.sizes
        new = [name for name in unit.blocks if not first.has_block(name)] if sizes.page else []
        size = sizes.own(unit) + len(new) * sizes.whole_block
        # What is worth little waits for a time when little is on its way.
        if self.leaving and self.leaving + size > (self.max_leaving // 2 if spare else self.max_leaving):
            first.refuse()
            return
        change = first.add(unit, spare=spare)
        if change is None:
            return
        self.leaving += change.bytes
        pages = _pages(entry) if sizes.page else []
        self._departures.append(Departure(unit, first, entry.slot, pages, change, spare))

    def take_departures(self) -> list[Departure]:
        """What is to be copied now, before anything else is dispatched."""
        departures, self._departures = self._departures, []
        return departures

    def moved(self, num_bytes: int) -> None:
        """So many bytes are on their way no more."""
        self.leaving -= num_bytes

    def spill(self, unit: Unit) -> Change | None:
        """Have the disk hold a unit that the host's memory has; None where it does so already, or may not now.

        What is evicted from memory later is there already, and what a process had when it was killed is, too.
        """
        disk = self.disk
        if disk is None or disk is self.tiers[0] or self.weights_replaced:
            return None
        if unit.name in disk.units:
            disk.touch(unit.name)
            return None
        if self.spilling and self.spilling + disk.sizes.unit(unit) > self.max_leaving:
            disk.refuse()
            return None
        change = disk.add(unit)
        if change is not None:
            self.spilling += change.bytes
        return change

    def spilled(self, num_bytes: int) -> None:
        """So many bytes have come to the disk, or will not."""
        self.spilling -= num_bytes

    def others_changed(self, gone: Collection[Name], new: Iterable[Unit], used: Iterable[Name]) -> None:
        """What other processes have done to the disk: parts that have gone, units that came, units that were used.

        What they brought counts like the process's own, so what has to go for it goes.
        """
        disk = self.disk
        if disk is None or self.weights_replaced:
            return
        for name in gone:
            self._gone.append((disk, disk.leave(name)))
        for name in used:
            disk.touch(name)
        for unit in new:
            change = disk.add(unit, counts=False)
            if change is not None:
                self._gone.append((disk, change.gone))

    def lost(self, held: TierHit) -> None:
        """A unit cannot be had from a tier, or never came there."""
        self._gone.append((held.tier, held.tier.drop(held.unit.name)))

    def lost_block(self, tier: Tier, name: Name) -> None:
        """A block cannot be had from a tier, and so none of the units that need it."""
        self._gone.append((tier, tier.drop_block(name)))

    def outdate(self) -> None:
        """The weights have been replaced: what memory holds is of no use any more.

        What the disk has belongs to the weights that the process was started with, and to its next start.
        """
        self.weights_replaced = True
        self.reset()
        if self.host is not None:
            self._gone.append((self.host, self.host.clear()))

    def clear(self) -> None:
        """Drop everything that all tiers hold."""
        self.reset()
        self._gone += [(tier, tier.clear()) for tier in self.tiers]

    def forget(self, tokens: Sequence[int], scope: Scope) -> None:
        """Nothing that these tokens lead to is to be trusted: drop it everywhere."""
        chain = Chain(scope, self.block)
        self._gone += [(tier, tier.forget(chain, tokens)) for tier in self.tiers]

    def reset(self) -> None:
        """The store is lost, or of no use: what was about to be copied from it will not be."""
        for departure in self.take_departures():
            self.moved(departure.change.bytes)
            self._gone.append((departure.tier, departure.change.gone))
            self.lost(TierHit(departure.tier, departure.unit))

    def take_gone(self) -> list[tuple[Tier, list[Name]]]:
        """Parts to remove since the last call, in order, except those that `Change.gone` names."""
        gone, self._gone = self._gone, []
        return gone

    # -- back to it --

    def find(self, chain: Chain, tokens: Sequence[int], position: int, matched: int) -> TierHit | None:
        """The deepest unit beyond `position` tokens that is worth fetching.

        `matched`: tokens whose keys and values the device has.
        """
        best: TierHit | None = None
        for tier in self.tiers:
            beyond = best.unit.position if best is not None else position
            unit = tier.find(chain, tokens, beyond)
            if unit is None:
                continue
            if self.prices.worth_fetching(tier.name, self.fetching + self.size(tier, unit, matched),
                                          unit.position - beyond):  # fmt: skip
                best = TierHit(tier, unit)
            else:
                self.fetches[tier.name].dearer += 1
        return best

    def reach(self, chain: Chain, tokens: Sequence[int], position: int) -> int:
        """How many of these tokens the deepest unit absorbs; `position` if none goes beyond that. Nothing is moved."""
        for tier in self.tiers:
            unit = tier.find(chain, tokens, position)
            position = position if unit is None else unit.position
        return position

    def size(self, tier: Tier, unit: Unit, matched: int) -> int:
        """Bytes to fetch where the device has the keys and values of so many tokens."""
        blocks = max(0, len(unit.blocks) - matched // self.block)
        return tier.sizes.own(unit) + blocks * tier.sizes.whole_block

    def snapshot(self) -> dict[str, dict[str, float]]:
        """By tier: its counters, how full it is, and what fetching from it takes."""
        return {
            tier.name: asdict(tier.stats)
            | asdict(self.fetches[tier.name])
            | {"units": len(tier), "used_bytes": tier.used, "capacity_bytes": tier.capacity}
            | {"seconds_per_byte": self.prices.per_byte.get(tier.name, 0.0)}
            for tier in self.tiers
        }

    def check(self) -> None:
        """Raise `AssertionError` unless every tier's books are right."""
        for tier in self.tiers:
            tier.check()


def _pages(entry: Checkpoint) -> list[int]:
    pages = [entry.page] if entry.page else []
    node: Node | None = entry.node
    while node is not None and not isinstance(node, Root):
        pages.append(node.page)
        node = node.parent
    return pages[::-1]
