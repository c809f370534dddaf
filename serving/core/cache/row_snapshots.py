"""A row that decodes with a state after every token: 1 + K slots for a step with K drafts.

Rejecting drafts is then a matter of which slot the next step reads. A second set of slots is leased while a step that
has not settled may hold a multiple of B:

        step i (unsettled)      reads a     writes a b c d    b may hold a multiple of B: i's boundary slot
        step i + 1 (planned)    reads ?     writes a c d e    any but b; which one it reads, the device knows
        settle i                kept >= 2: b is published, and a c d e are the row's; else b is written again

The checkpoint that a row read last is let go of once the step that goes on from it is dispatched.
"""

from collections.abc import Sequence

from serving.core.cache.cache import Cache
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.row_pages import Content
from serving.core.cache.row_state import RowState, StateAccess


class RowSnapshots(RowState):
    """See the module's text."""

    __slots__ = ("_block", "_usual", "_usual_count")

    def __init__(self, cache: Cache) -> None:
        super().__init__(cache)
        self._block = cache.block
        self._usual: StateAccess | None = None
        """The access of steps that continue on the device and can cross no boundary: one serves them all."""
        self._usual_count = 0
        """How many slots it writes; 0 = there is none."""

    def reserve_decode(
        self, count: int, shortest: int, longest: int, continues: bool, after: StateAccess | None
    ) -> StateAccess | None:
        """See `RowState`. Slots that may come to hold a multiple of B for any length before the step are kept until it
        has settled.
        """
        block = self._block
        boundary = shortest - shortest % block + block
        crosses = boundary <= longest + count
        plain = continues and not crosses and (after is None or not after.boundary)
        if plain and count == self._usual_count:
            return self._usual
        slots = self._choose(count, after)
        if not slots:
            return None
        access = StateAccess(0 if continues else self._current, slots)
        if crosses:
            access.boundary = _boundary_slots(slots, shortest, longest, boundary, block)
        if self._read_only:
            self.leaving, self._read_only = self._read_only, 0
        elif plain:
            self._usual, self._usual_count = access, len(slots)
        return access

    def _choose(self, count: int, after: StateAccess | None) -> list[int]:
        """Up to `count` slots that the next step may write; at least one, or the row has to wait.

        Not those in which an unsettled step may have left a multiple of B, unless nothing else is available: keeping
        a checkpoint is best effort, going on is not. All others may be written, the one that the step reads included,
        because a step reads before it writes.
        """
        own = self._own
        kept = after.boundary if after is not None else ()
        if after is not None and kept and len(own) >= count and not self._cache.can_spare_slot():
            self._give_up_boundary(after)
            kept = ()
        usable = [slot for slot in own if slot not in kept] if kept else own[:count]
        while len(usable) < count:
            fresh = self.lease()
            if not fresh:
                break
            usable.append(fresh)
        if usable:
            return usable[:count]
        if after is not None and kept:
            self._give_up_boundary(after)
            return own[:count]
        return self._take_back_checkpoint()

    def _give_up_boundary(self, access: StateAccess) -> None:
        """The next step may write over what an unsettled step would have published."""
        access.boundary = ()
        self._cache.stats.boundaries_not_kept += 1

    def advance(self, access: StateAccess, before: int, kept: int) -> bool:
        self._current = access.writes[kept - 1]
        return len(self._own) > self._cache.width

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        slot, cache = access.writes[nth], self._cache
        if slot not in access.boundary:
            return
        if len(self._own) == 1 and not cache.can_spare_slot():
            # The row needs another slot to write, and so does a waiting request.
            cache.stats.boundaries_not_kept += 1
            return
        assert cache.index is not None
        if not cache.index.publish_state(content, position, slot, CheckpointKind.BOUNDARY):
            return
        self._disown(slot)
        if slot == self._current and not unsettled:
            self._read_only = slot
        elif slot == self._current and pending:
            self.leaving = slot
        else:
            cache.slots.release(slot)

    def trim(self, after: StateAccess | None) -> None:
        """Give back what the row has beyond 1 + K slots, except where its next step may read."""
        surplus = len(self._own) - self._cache.width
        if surplus <= 0:
            return
        keep = {self._current}
        if after is not None:
            keep.update(after.writes)
            keep.update(after.boundary)
        for slot in [slot for slot in self._own if slot not in keep][:surplus]:
            self._disown(slot)
            self._cache.slots.release(slot)

    def _disown(self, slot: int) -> None:
        super()._disown(slot)
        self._usual_count = 0

    def undo(self) -> None:
        if self.leaving:
            self._usual_count = 0
        super().undo()


def _boundary_slots(slots: Sequence[int], shortest: int, longest: int, boundary: int, block: int) -> Sequence[int]:
    """Those of a step's slots in which a multiple of B lands for some length in [shortest, longest]."""
    count = len(slots)
    found: list[int] = []
    while boundary <= longest + count:
        found += slots[max(0, boundary - longest - 1) : max(0, boundary - shortest)]
        boundary += block
    return found
