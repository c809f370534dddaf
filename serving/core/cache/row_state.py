"""The state of one running sequence: which slots it has, and what each step reads and writes of them.

The life of a slot, seen from its row:

                 lease                  publish                     release
        free ───────────▶ own ─────────────────────▶ read-only ───────────────▶ cached
          ▲                │                             │                     (the index's alone)
          └──── release ───┘ ◀──── withdraw, if no ──────┘
                                   other row reads it

*own*: only this row writes it. With K drafts 1 + K slots, one for the state after each token of a step; a second set
while a step that has not settled may hold a multiple of B:

        step i (unsettled)      reads a     writes a b c d    b may hold a multiple of B: i's boundary slot
        step i + 1 (planned)    reads ?     writes a c d e    any but b; which one it reads, the device knows
        settle i                kept >= 2: b is published, and a c d e are the row's; else b is written again

*read-only*: a checkpoint, published by this row or found in the cache. The row's next step reads it and writes
elsewhere, and the row lets go of it once that step is dispatched.

*current*: where S(c) lies as of the last settled step: one of the row's own slots, or the checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.cache.cache import Cache
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.row_pages import Content


class StateAccess:
    """What one step reads and writes of its row's state; opaque to planning, index arrays to the device.

    It never changes once it has been planned, and one object may serve many steps.
    """

    __slots__ = ("boundary", "read", "writes")

    def __init__(self, read: int, writes: Sequence[int], boundary: Sequence[int] = ()) -> None:
        self.read = read
        """The slot of S(c); 0 = a fresh sequence, or a row that continues: then the device knows which."""
        self.writes = writes
        """Where states go: after each token of a decode row, at the end of each tile of a prefill row; 0 = nowhere."""
        self.boundary = boundary
        """Those of `writes` in which a multiple of B may land: kept from the next step until this one settles."""


@dataclass(slots=True)
class Publication:
    """A state that a prefill writes and that becomes findable once its step is dispatched."""

    position: int
    kind: CheckpointKind
    slot: int


class RowState:
    """Owns the slots of one running sequence: nothing else leases, publishes or releases them.

    `after`, where a verb asks for it, is the access of the row's last step that has not settled, if there is one.
    """

    __slots__ = (
        "_block",
        "_cache",
        "_current",
        "_own",
        "_publications",
        "_read_only",
        "_usual",
        "_usual_count",
        "leaving",
    )

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._block = cache.block
        self._own: list[int] = []
        self._read_only = 0
        self._current = 0
        self._publications: Sequence[Publication] = ()
        """Of the step that is planned and not yet dispatched."""
        self.leaving = 0
        """A checkpoint that the row lets go of once the planned step is dispatched; 0 = none."""
        self._usual: StateAccess | None = None
        """The access of steps that continue on the device and can cross no boundary: one serves them all."""
        self._usual_count = 0
        """How many slots it writes; 0 = there is none."""

    @property
    def num_slots(self) -> int:
        """Slots that only this row writes."""
        return len(self._own)

    # -- beginning --

    def lease(self) -> int:
        """One more slot of its own; 0 = none is available."""
        slot = self._cache.slots.take()
        if slot:
            self._own.append(slot)
        return slot

    def resume_from(self, slot: int) -> None:
        """Begin from a checkpoint: it cannot go from now on."""
        self._cache.slots.retain(slot)
        self._read_only = self._current = slot

    # -- what the next step reads, and may write --

    def reserve_decode(
        self, count: int, shortest: int, longest: int, continues: bool, after: StateAccess | None
    ) -> StateAccess | None:
        """For a decode step that feeds `count` tokens, or fewer: as many as there are `writes`. None: no slot at all.

        The row's length before the step lies in [shortest, longest]; slots that may come to hold a multiple of B for
        any length in between are kept until the step has settled. `continues`: the device knows which slot to read.
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

    def reserve_chunk(
        self,
        start: int,
        end: int,
        unit: int,
        publish: Sequence[tuple[int, CheckpointKind, bool]],
        *,
        after: StateAccess | None,
        admitting: bool,
    ) -> StateAccess | None:
        """For a step that feeds the known tokens [start, end) and can store a state after every `unit`; None: no slot.

        `publish`: (position, kind, low value) of the states worth publishing. Each gets a slot if one can be spared,
        the deepest first; that at the end lies in the row's own slot, which everybody may read from then on, if the
        row has another to write. `admitting`: the request is only just being admitted.
        """
        slots = self._choose(1, after)
        if not slots:
            return None
        first = start // unit
        writes = [0] * (-(-end // unit) - first)
        self._publications = self._choose_publications(end, publish, slots[0], admitting)
        for each in self._publications:
            writes[-(-each.position // unit) - first - 1] = each.slot
        writes[-1] = slots[0]
        self.leaving, self._read_only = self._read_only, 0
        return StateAccess(self._read_slot(after) if start else 0, writes)

    def read_again(self, after: StateAccess | None) -> StateAccess:
        """For a step that feeds nothing: the state is read, and read once more by the step after it."""
        return StateAccess(self._read_slot(after), ())

    def publishing(self) -> list[int]:
        """Positions at which the planned step's states are about to become findable, ascending."""
        return [each.position for each in self._publications]

    def _read_slot(self, after: StateAccess | None) -> int:
        return after.writes[-1] if after is not None else self._current

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
        checkpoint, slots = self._read_only, self._cache.slots
        if checkpoint and slots.refs[checkpoint] == 1:
            # Nobody else reads the checkpoint that this row goes on from: it becomes the row's own again.
            slots.withdraw(checkpoint)
            self._read_only = 0
            own.append(checkpoint)
            return [checkpoint]
        return []

    def _give_up_boundary(self, access: StateAccess) -> None:
        """The next step may write over what an unsettled step would have published."""
        access.boundary = ()
        self._cache.stats.boundaries_not_kept += 1

    def _choose_publications(
        self, end: int, publish: Sequence[tuple[int, CheckpointKind, bool]], last: int, admitting: bool
    ) -> list[Publication]:
        found: list[Publication] = []
        cache = self._cache
        for position, kind, low_value in reversed(publish):
            slot = 0
            if position == end:
                if len(self._own) == 1 and cache.can_spare_slot(admitting=admitting):
                    self.lease()
                slot = last if len(self._own) > 1 else 0
            elif cache.can_spare_slot(admitting=admitting):
                slot = cache.slots.take_low_value() if low_value else cache.slots.take()
            if slot:
                found.append(Publication(position, kind, slot))
            else:
                cache.stats.boundaries_not_kept += 1
        # Ascending again: the index grows downwards.
        return found[::-1]

    # -- what has become of a step --

    def dispatched(self, content: Content) -> None:
        """The planned step is in the device's queue: let go of its checkpoint, publish the known states it writes."""
        slots, index = self._cache.slots, self._cache.index
        if self.leaving:
            slots.release(self.leaving)
            self.leaving = 0
        for each in self._publications:
            assert index is not None
            new = index.publish_state(content, each.position, each.slot, each.kind)
            if each.slot not in self._own:
                slots.release(each.slot)
            elif new:
                self._disown(each.slot)
                self._read_only = each.slot
        self._publications = ()

    def advance(self, access: StateAccess, kept: int) -> bool:
        """A decode step has settled with `kept` of its tokens. Whether there are more slots than needed: see `trim`."""
        self._current = access.writes[kept - 1]
        return len(self._own) > self._cache.width

    def advance_chunk(self, access: StateAccess) -> None:
        """A step all of whose tokens were known has settled."""
        self._current = access.writes[-1]

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        """Publish the state after a settled decode step's nth token (from 0): S(position), a multiple of B.

        unsettled: a later step of the row has been planned; pending: it has not been dispatched yet.
        """
        slot, cache = access.writes[nth], self._cache
        if slot not in access.boundary:
            return
        if len(self._own) == 1 and not cache.can_spare_slot():
            # The row needs another to write, and so does whoever waits.
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
        self._own.remove(slot)
        self._usual_count = 0

    # -- letting go --

    def undo(self) -> None:
        """Make the planned step as if it had never been."""
        if self.leaving:
            self._read_only, self.leaving = self.leaving, 0
            self._usual_count = 0
        self._release_publications()

    def release(self) -> None:
        """Give everything back. A step that was dispatched may still run: slots are handed out only to later steps."""
        slots = self._cache.slots
        self._release_publications()
        for slot in (*self._own, self._read_only, self.leaving):
            if slot:
                slots.release(slot)

    def _release_publications(self) -> None:
        for each in self._publications:
            if each.slot not in self._own:
                self._cache.slots.release(each.slot)
        self._publications = ()

    # -- from and for other workers --

    def arrived(self, slot: int, content: Content, position: int, kind: CheckpointKind | None) -> None:
        """S(position) has come into the leased `slot`; published as `kind` if the row can have another to write."""
        self._current = slot
        cache = self._cache
        if cache.index is None or kind is None:
            return
        if not cache.can_spare_slot():
            cache.stats.boundaries_not_kept += 1
            return
        spare = cache.slots.take()
        if cache.index.publish_state(content, position, slot, kind):
            self._own, self._read_only = [spare], slot
        else:
            cache.slots.release(spare)

    def hand_off(self, access: StateAccess) -> int:
        """The slot in which a dispatched step leaves the row's state, referenced once more: the caller releases it."""
        slot = access.writes[-1] if access.writes else access.read
        self._cache.slots.retain(slot)
        return slot


def _boundary_slots(slots: Sequence[int], shortest: int, longest: int, boundary: int, block: int) -> Sequence[int]:
    """Those of a step's slots in which a multiple of B lands for some length in [shortest, longest]."""
    count = len(slots)
    found: list[int] = []
    while boundary <= longest + count:
        found += slots[max(0, boundary - longest - 1) : max(0, boundary - shortest)]
        boundary += block
    return found
