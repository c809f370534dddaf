"""The slots of one running sequence, and the slots that each step reads and writes.

The life of a slot, seen from its row:

                 lease                  publish                     release
        free ───────────▶ own ─────────────────────▶ read-only ───────────────▶ cached
          ▲                │                             │                     (the index's alone)
          └──── release ───┘ ◀──── withdraw, if no ──────┘
                                   other row reads it

*own*: only this row writes it. The number of own slots in decode depends on the form of the row: see `row_forms`
(a state after every token; or an anchor, and the inputs since then).

*read-only*: a checkpoint, published by this row or found in the cache. The row reads it and writes to other slots, and
releases it when no dispatched step can continue from it.

*current*: the slot from which the row continues as of the last settled step: an own slot, or the checkpoint.

This module has the parts that both forms share: the start, chunks of known tokens and their publication, and the end.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.core.cache.cache import Cache
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.row_pages import Content


class StateAccess:
    """The slots that one step reads and writes for a row. Planning does not look inside; the device gets index arrays.

    An access does not change after it has been planned, and many steps may share one.
    """

    __slots__ = ("boundary", "read", "writes")

    def __init__(self, read: int, writes: Sequence[int], boundary: Sequence[int] = ()) -> None:
        self.read = read
        """The slot of S(c); 0 = zeros, or a row that continues, for which the device knows the slot."""
        self.writes = writes
        """Slots of the states after each token of a decode row, or at the end of each tile of a prefill row; 0 =
        none."""
        self.boundary = boundary
        """Members of `writes` that may receive a multiple of B. The next step does not write them until this one
        settles."""

    @property
    def room(self) -> int:
        """Number of tokens that a decode row may feed."""
        return len(self.writes)


@dataclass(slots=True)
class Publication:
    """A state that a prefill step writes. It is published when the step is dispatched."""

    position: int
    kind: CheckpointKind
    slot: int


class RowState:
    """Owns the slots of one running sequence: no other object leases, publishes or releases them.

    Subclasses implement decoding. In all methods, `after` is the access of the row's last unsettled step, or None.
    """

    __slots__ = ("_cache", "_current", "_own", "_publications", "_read_only", "leaving")

    def __init__(self, cache: Cache, start: int) -> None:
        """`start`: the slot of a learned initial state, outside the pool, that the engine owns; 0 = zeros."""
        self._cache = cache
        self._own: list[int] = []
        self._read_only = 0
        self._current = start
        self._publications: Sequence[Publication] = ()
        """Publications of the planned step that is not yet dispatched."""
        self.leaving = 0
        """A checkpoint that the row releases when the planned step is dispatched; 0 = none."""

    # -- start --

    def lease(self) -> int:
        """Takes one more slot for the row. Returns 0 if none is available."""
        slot = self._cache.slots.take()
        if slot:
            self._own.append(slot)
        return slot

    def resume_from(self, slot: int) -> None:
        """Starts from a checkpoint, and retains it."""
        self._cache.slots.retain(slot)
        self._read_only = self._current = slot

    # -- slots that the next step reads and may write --

    def reserve_decode(self, count: int, shortest: int, longest: int, after: StateAccess | None) -> StateAccess | None:
        """Returns the access of a decode step that feeds `count` tokens, or fewer if slots are short. None: no slot.

        The row's length before the step lies in [shortest, longest]. The device knows the slot to read.
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
        """Returns the access of a step that feeds the known tokens [start, end).

        The step can store a state after every `unit` tokens. Returns None if there is no slot. `publish`: (position,
        kind, low value) of the states to publish. Each gets a slot if one is available, the deepest first. The state at
        the end is in the row's own slot, which all rows may read after publication, if the row has another slot to
        write. `admitting`: the request is being admitted. A step without tokens reads the state again.
        """
        if start == end:
            return StateAccess(self._read_slot(after), ())
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
        return StateAccess(self._read_slot(after), writes)

    def publishing(self) -> list[int]:
        """Positions of the states that the planned step will publish, ascending."""
        return [each.position for each in self._publications]

    def _read_slot(self, after: StateAccess | None) -> int:
        return after.writes[-1] if after is not None else self._current

    def _choose(self, count: int, after: StateAccess | None) -> list[int]:
        """Returns up to `count` slots that the next step may write. An empty result means that the row has to wait."""
        own = self._own
        while len(own) < count and self.lease():
            pass
        return own[:count] or self._take_back_checkpoint()

    def _take_back_checkpoint(self) -> list[int]:
        """Withdraws the checkpoint from which the row continues, if no other row reads it, so that the row may write
        it."""
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
                slot = cache.slots.take(low_value=low_value)
            if slot:
                found.append(Publication(position, kind, slot))
            else:
                cache.stats.boundaries_not_kept += 1
        # Ascending again, because parents must be in the index before their children.
        return found[::-1]

    # -- dispatched and settled steps --

    def dispatched(self, content: Content) -> None:
        """Called when the planned step is dispatched: releases its checkpoint, and publishes the known states that it
        writes."""
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

    def advance_chunk(self, access: StateAccess) -> None:
        """Records a settled step whose tokens were all known: the state after them is in the last slot that it
        wrote."""
        self._current = access.writes[-1]

    def advance(self, access: StateAccess, before: int, kept: int) -> bool:
        """Called when a decode step has settled and kept a number of its tokens from `before` on.

        Returns whether the row has more slots than it needs: see `trim`.
        """
        raise NotImplementedError

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        """Publishes the state after a settled decode step's nth token (from 0): S(position), a multiple of B.

        `unsettled`: a later step of the row has been planned; `pending`: it has not been dispatched yet.
        """
        raise NotImplementedError

    def _publish(self, slot: int, content: Content, position: int) -> bool:
        """Publishes S(position), a multiple of B, in an own slot. Returns False if the row needs the slot and waiting
        requests all others, or if there is an equal state."""
        cache = self._cache
        if len(self._own) == 1 and not cache.can_spare_slot():
            cache.stats.boundaries_not_kept += 1
            return False
        assert cache.index is not None
        if not cache.index.publish_state(content, position, slot, CheckpointKind.BOUNDARY):
            return False
        self._disown(slot)
        return True

    def trim(self, after: StateAccess | None) -> None:
        """Releases the slots that the row does not need, except those that its next step may read."""
        raise NotImplementedError

    def _release_surplus(self, least: int, keep: Iterable[int]) -> None:
        """Releases own slots except `keep`, as long as there are more than `least`."""
        for slot in [slot for slot in self._own if slot not in keep]:
            if len(self._own) > least:
                self._disown(slot)
                self._cache.slots.release(slot)

    def _disown(self, slot: int) -> None:
        self._own.remove(slot)

    # -- end --

    def undo(self) -> None:
        """Undoes the planned step."""
        if self.leaving:
            self._read_only, self.leaving = self.leaving, 0
        self._release_publications()

    def release(self) -> None:
        """Releases all slots. A dispatched step may still run; only later steps can take its slots."""
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
        """Records that S(position) was loaded into the leased `slot`. Publishes it as `kind` if the row can have
        another slot to write."""
        self._current, cache = slot, self._cache
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
        """Returns the slot with the row's state after a dispatched step, with one more reference. The caller releases
        it."""
        slot = access.writes[-1] if access.writes else access.read
        self._cache.slots.retain(slot)
        return slot
