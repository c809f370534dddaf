"""The two forms of a decoding row: a state after every token (snapshots), or an anchor and inputs since (replay)."""

from collections.abc import Sequence

from serving.core.cache.cache import Cache
from serving.core.cache.row_pages import Content
from serving.core.cache.row_state import RowState, StateAccess


class RowSnapshots(RowState):
    """A row that decodes with a state after every token: 1 + K slots for a step with K drafts.

    Rejecting drafts then only changes the slot that the next step reads. A second set of slots is leased while an
    unsettled step may contain a multiple of B:

        step i (unsettled)      reads a     writes a b c d    b may hold a multiple of B: i's boundary slot
        step i + 1 (planned)    reads ?     writes a c d e    any but b; the device knows which one it reads
        settle i                kept >= 2: b is published, and a c d e are the row's; else b is written again

    The last checkpoint that a row read is released when the step that continues from it is dispatched.
    """

    __slots__ = ("_block", "_usual", "_usual_count")

    def __init__(self, cache: Cache, start: int) -> None:
        super().__init__(cache, start)
        self._block = cache.block
        self._usual: StateAccess | None = None
        """The access of steps that cross no boundary, shared by all of them."""
        self._usual_count = 0
        """Number of slots that it writes; 0 = no plan."""

    def reserve_decode(self, count: int, shortest: int, longest: int, after: StateAccess | None) -> StateAccess | None:
        """See `RowState`. Slots that may receive a multiple of B, for any length before the step, are not written
        again until the step has settled.
        """
        block = self._block
        boundary = shortest - shortest % block + block
        crosses = boundary <= longest + count
        plain = not crosses and (after is None or not after.boundary)
        if plain and count == self._usual_count:
            return self._usual
        slots = self._choose(count, after)
        if not slots:
            return None
        access = StateAccess(0, slots)
        if crosses:
            access.boundary = _boundary_slots(slots, shortest, longest, boundary, block)
        if self._read_only:
            self.leaving, self._read_only = self._read_only, 0
        elif plain:
            self._usual, self._usual_count = access, len(slots)
        return access

    def _choose(self, count: int, after: StateAccess | None) -> list[int]:
        """Returns up to `count` slots that the next step may write. An empty result means that the row has to wait.

        Slots in which an unsettled step may have left a multiple of B are used only if no other slot is available: a
        checkpoint may be lost, but the row must progress. The slot that the step reads may also be written, because a
        step reads before it writes.
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
        """Allows the next step to overwrite slots that an unsettled step would have published."""
        access.boundary = ()
        self._cache.stats.boundaries_not_kept += 1

    def advance(self, access: StateAccess, before: int, kept: int) -> bool:
        self._current = access.writes[kept - 1]
        return len(self._own) > self._cache.width

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        slot = access.writes[nth]
        if slot not in access.boundary or not self._publish(slot, content, position):
            return
        if slot == self._current and not unsettled:
            self._read_only = slot
        elif slot == self._current and pending:
            self.leaving = slot
        else:
            self._cache.slots.release(slot)

    def trim(self, after: StateAccess | None) -> None:
        """Releases slots beyond 1 + K, except those that the row's next step may read."""
        if len(self._own) > self._cache.width:
            needed = (*after.writes, *after.boundary) if after is not None else ()
            self._release_surplus(self._cache.width, {self._current, *needed})

    def _disown(self, slot: int) -> None:
        super()._disown(slot)
        self._usual_count = 0

    def undo(self) -> None:
        if self.leaving:
            self._usual_count = 0
        super().undo()


def _boundary_slots(slots: Sequence[int], shortest: int, longest: int, boundary: int, block: int) -> Sequence[int]:
    """Returns a step's slots that receive a multiple of B for some length in [shortest, longest]."""
    count = len(slots)
    found: list[int] = []
    while boundary <= longest + count:
        found += slots[max(0, boundary - longest - 1) : max(0, boundary - shortest)]
        boundary += block
    return found


class ReplayAccess(StateAccess):
    """The slots of a decode step: the device knows the anchor's, from which it reads; `writes` has at most one slot,
    the spare."""

    __slots__ = ("_room", "reaches")

    def __init__(self, room: int, spare: int = 0, reaches: int = 0) -> None:
        super().__init__(0, (spare,) if spare else ())
        self._room = room
        self.reaches = reaches
        """The multiple of R whose state the spare receives; 0 = the step reaches none."""

    @property
    def room(self) -> int:
        return self._room


class RowReplay(RowState):
    """A row that decodes from an anchor: a complete state S(a), and the inputs of the tokens since then on the device.

    A step computes its outputs from the anchor and these inputs (the row's tail). It writes a state only if it reaches
    a multiple m of R: S(m), into the spare. Rejected drafts do not advance the row. With an anchor's slot a and a spare
    s:

        step i (unsettled)      reads a, writes s if it reaches m       drafts may be rejected, so that c < m after all
        step i + 1 (planned)    reads a or s: the device knows          gets s again, in case it has to repeat m
        settle i                c >= m: s is the anchor (published if m is a multiple of B), and a is released;
                                else a is the anchor still, and step i + 1 writes s

    At most one multiple of R is unsettled, because two steps feed at most 2 (1 + K) <= R tokens. The anchor may be a
    checkpoint: it is the row's until the next anchor has settled.

    A spare is leased when a step may reach a multiple of R, and released after it has: most of the time a row has only
    the anchor. If no slot is left, the row continues without drafts, so that it certainly reaches the multiple, and
    overwrites its anchor. A row whose anchor is a checkpoint always keeps an own slot for this.

    `_current` is the anchor's slot as of the last settled step.
    """

    __slots__ = ("_interval", "_position", "_usual")

    def __init__(self, cache: Cache, start: int) -> None:
        super().__init__(cache, start)
        self._interval = cache.config.replay_interval
        self._position = 0
        """Number of tokens in the anchor's state, if a decode step has written it."""
        self._usual: ReplayAccess | None = None
        """The access of steps that write nothing, shared by all that feed the same number of tokens."""

    def reserve_decode(self, count: int, shortest: int, longest: int, after: StateAccess | None) -> StateAccess | None:
        """See `RowState`. A row with an anchor can always continue."""
        interval = self._interval
        reaches = shortest - shortest % interval + interval
        if reaches > longest + count:
            usual = self._usual
            if usual is None or usual.room != count:
                usual = self._usual = ReplayAccess(count)
            return usual
        anchor = self._anchor_slot(after)
        # If the unsettled step may have reached the same multiple, use its spare. If the spare is the anchor by now,
        # the multiple is not reached again.
        spare = next((slot for slot in self._own if slot != anchor), 0) or self.lease()
        if not spare:
            # Only certain tokens: those that reach the multiple stay, so the anchor is no longer needed.
            assert anchor in self._own, "a row whose anchor is a checkpoint has a slot of its own"
            return ReplayAccess(1, anchor, reaches)
        return ReplayAccess(count, spare, reaches)

    def _anchor_slot(self, after: StateAccess | None) -> int:
        """The anchor before the next step, unless an unsettled step has moved it to its spare."""
        if after is None or isinstance(after, ReplayAccess):
            return self._current
        return after.writes[-1] if after.writes else after.read

    def advance(self, access: StateAccess, before: int, kept: int) -> bool:
        assert isinstance(access, ReplayAccess)
        if before < access.reaches <= before + kept:
            self._cache.stats.anchors += 1
            if self._read_only:
                self._cache.slots.release(self._read_only)
                self._read_only = 0
            self._current, self._position = access.writes[0], access.reaches
        return len(self._own) > 1

    def publish_boundary(
        self, access: StateAccess, nth: int, content: Content, position: int, *, unsettled: bool, pending: bool
    ) -> None:
        """See `RowState`. The state is the row's anchor, and stays so."""
        slot = self._current
        if self._position == position and slot in self._own and self._publish(slot, content, position):
            self._read_only = slot
            if not self._own:
                self.lease()

    def trim(self, after: StateAccess | None) -> None:
        """Releases all slots except the anchor, those that the unsettled step may write, and a spare with a
        checkpoint."""
        written = after.writes if after is not None else ()
        self._release_surplus(1 if self._read_only else 0, {self._anchor_slot(after), self._current, *written})
