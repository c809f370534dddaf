"""The state of one running sequence: which slots it has, and what each step reads and writes of them.

The life of a slot, seen from its row:

                 lease                  publish                     release
        free ───────────▶ own ─────────────────────▶ read-only ───────────────▶ cached
          ▲                │                             │                     (the index's alone)
          └──── release ───┘ ◀──── withdraw, if no ──────┘
                                   other row reads it

*own*: only this row writes it. How many it takes to decode depends on the form of a running row: see `row_snapshots`
(a state after every token) and `row_replay` (an anchor, and the inputs since).

*read-only*: a checkpoint, published by this row or found in the cache. The row reads it and writes elsewhere, and lets
go of it once nothing that it has dispatched can go on from there.

*current*: where the row goes on from as of the last settled step: one of the row's own slots, or the checkpoint.

What all rows do is here: beginning, chunks of known tokens, publishing these, leaving.
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

    @property
    def room(self) -> int:
        """How many tokens a decode row may feed."""
        return len(self.writes)


@dataclass(slots=True)
class Publication:
    """A state that a prefill writes and that becomes findable once its step is dispatched."""

    position: int
    kind: CheckpointKind
    slot: int


class RowState:
    """Owns the slots of one running sequence: nothing else leases, publishes or releases them.

    Abstract in how it decodes. `after`, where a verb asks for it, is the access of the row's last step that has not
    settled, if there is one.
    """

    __slots__ = ("_cache", "_current", "_own", "_publications", "_read_only", "leaving")

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._own: list[int] = []
        self._read_only = 0
        self._current = 0
        self._publications: Sequence[Publication] = ()
        """Of the step that is planned and not yet dispatched."""
        self.leaving = 0
        """A checkpoint that the row lets go of once the planned step is dispatched; 0 = none."""

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

    def resume_from(self, slot: int, position: int) -> None:
        """Begin from a checkpoint, S(position): it cannot go from now on."""
        self._cache.slots.retain(slot)
        self._read_only = self._current = slot

    # -- what the next step reads, and may write --

    def reserve_decode(
        self, count: int, shortest: int, longest: int, continues: bool, after: StateAccess | None
    ) -> StateAccess | None:
        """For a decode step that feeds `count` tokens, or as many fewer as the access has room for. None: no slot.

        The row's length before the step lies in [shortest, longest]. `continues`: the device knows what to read.
        """
        raise NotImplementedError

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
        """Up to `count` slots that the next step may write, at least one; or none: the row has to wait."""
        own = self._own
        while len(own) < count and self.lease():
            pass
        return own[:count] or self._take_back_checkpoint()

    def _take_back_checkpoint(self) -> list[int]:
        """Take back the checkpoint that the row continues from, if no other row reads it."""
        checkpoint, slots = self._read_only, self._cache.slots
        if not checkpoint or slots.refs[checkpoint] != 1:
            return []
        slots.withdraw(checkpoint)
        self._read_only = 0
        self._own.append(checkpoint)
        return [checkpoint]

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

    def advance_chunk(self, access: StateAccess, position: int) -> None:
        """A step all of whose tokens were known has settled: S(position) is in the last slot that it wrote."""
        self._current = access.writes[-1]

    def advance(self, access: StateAccess, before: int, kept: int) -> bool:
        """A decode step has settled: of its tokens from `before` on, it has kept so many.

        Whether there are more slots than needed: see `trim`.
        """
        raise NotImplementedError

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        """Publish the state after a settled decode step's nth token (from 0): S(position), a multiple of B.

        unsettled: a later step of the row has been planned; pending: it has not been dispatched yet.
        """
        raise NotImplementedError

    def trim(self, after: StateAccess | None) -> None:
        """Give back the slots that the row does not need, except where its next step may read."""
        raise NotImplementedError

    def _disown(self, slot: int) -> None:
        self._own.remove(slot)

    # -- letting go --

    def undo(self) -> None:
        """Make the planned step as if it had never been."""
        if self.leaving:
            self._read_only, self.leaving = self.leaving, 0
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
