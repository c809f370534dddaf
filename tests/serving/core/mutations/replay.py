"""Anchors, spares and what lies between them."""

from serving.core import SchedulerConfig
from serving.core.cache.row_replay import ReplayAccess, RowReplay
from serving.core.cache.row_state import RowState
from tests.serving.core.mutations.registry import Patch, mutation, replacing


@mutation(66, "a spare is given back although an unsettled step may have written it", "replay: accounts")
@replacing(RowReplay, "trim")
def spare_given_back(whole, self, after):
    whole(self, None)


@mutation(67, "a spare is leased to two rows", "replay: two owners")
def spare_leased_twice(patch: Patch) -> None:
    last: dict[int, int] = {}

    def lease(whole, self):
        pool, before = self._cache.slots, last.get(id(self._cache), 0)
        free = before and pool.refs[before] == 1 and pool.owners[before] is None and before not in self._own
        if free and len(self._own) == 1:
            pool.retain(before)
            self._own.append(before)
            return before
        last[id(self._cache)] = slot = whole(self)
        return slot

    replacing(RowReplay, "lease")(lease)(patch)


@mutation(68, "a published anchor stays the row's own, and is written", "replay: invariant 2")
@replacing(RowReplay, "publish_boundary")
def published_anchor_stays_own(whole, self, *boundary, **later):
    whole(self, *boundary, **later)
    if self._read_only:
        self._own.insert(0, self._read_only)
        self._read_only = 0


@mutation(69, "the host takes a spare for the anchor before the step that writes it has settled", "replay: settle")
@replacing(RowReplay, "reserve_decode")
def anchor_before_settle(whole, self, *step):
    access = whole(self, *step)
    if access is not None and access.reaches:
        self._current, self._anchor = access.writes[0], access.reaches
    return access


@mutation(70, "a checkpoint is let go once a step has read it, though it is the anchor still", "replay: anchors")
@replacing(RowReplay, "reserve_decode")
def anchor_let_go(whole, self, *step):
    access = whole(self, *step)
    if self._read_only:
        self._cache.slots.release(self._read_only)
        self._read_only = 0
    return access


@mutation(71, "all drafts count as kept when the host moves its anchor", "replay: rejected drafts")
@replacing(RowReplay, "advance")
def anchor_from_rejected_drafts(whole, self, access, before, kept):
    return whole(self, access, before, access.room)


@mutation(72, "a row resumes from a position rounded down to a multiple of R", "replay: resumed position")
@replacing(RowReplay, "resume_from")
def resumed_position_rounded(whole, self, slot, position):
    whole(self, slot, position - position % self._interval)


@mutation(73, "a row writes over its anchor though its drafts may be rejected", "replay: no spare")
@replacing(RowReplay, "reserve_decode")
def written_over_with_drafts(whole, self, count, *rest):
    access = whole(self, count, *rest)
    if access is not None and access.room < count:
        return ReplayAccess(access.read, access.anchor, count, access.writes[0], access.reaches)
    return access


@mutation(74, "no slot is kept in addition to a checkpoint that is the anchor", "replay: no spare")
@replacing(RowReplay, "trim")
def no_slot_besides_the_anchor(whole, self, after):
    keep = {self._anchor_slot(after), self._current, *(after.writes if after is not None else ())}
    for slot in [slot for slot in self._own if slot not in keep]:
        self._disown(slot)
        self._cache.slots.release(slot)


@mutation(75, "a prompt's short end is fed by a decode row, which stores no state for it", "replay: chunks")
def short_end_decodes(patch: Patch) -> None:
    patch.setattr(SchedulerConfig, "known_tokens_in_decode_row", property(lambda self: 1 + self.num_speculative_tokens))


@mutation(76, "the spare is leased only when the multiple of R is reached for certain", "replay: leased late")
@replacing(RowReplay, "reserve_decode")
def leased_too_late(whole, self, count, shortest, longest, *rest):
    return whole(self, count, shortest, shortest, *rest)


@mutation(77, "the end of a chunk is not taken for the anchor's position", "replay: anchors")
@replacing(RowReplay, "advance_chunk")
def chunk_end_forgotten(whole, self, access, position):
    RowState.advance_chunk(self, access, position)


@mutation(78, "old anchors are never given back", "replay: accounts")
@replacing(RowReplay, "trim")
def anchors_kept(whole, self, after):
    return None


@mutation(79, "the anchor stays where it was although a multiple of R was passed", "replay: anchors")
@replacing(RowReplay, "advance")
def anchor_left_behind(whole, self, access, before, kept):
    return len(self._own) > 1


@mutation(80, "a step that begins on a multiple of R is thought to have reached it", "replay: a == c")
@replacing(RowReplay, "advance")
def begins_on_multiple(whole, self, access, before, kept):
    begins = before == access.reaches > 0
    return whole(self, access, before - begins, kept + begins)


@mutation(81, "the checkpoint that a row has moved on from is never given back", "replay: accounts")
@replacing(RowReplay, "advance")
def old_checkpoint_kept(whole, self, access, before, kept):
    if self._read_only:
        self._cache.slots.retain(self._read_only)
    return whole(self, access, before, kept)
