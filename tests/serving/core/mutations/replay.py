"""Anchors, spares and what lies between them."""

from serving.core import SchedulerConfig
from serving.core.cache.row_forms import ReplayAccess, RowReplay
from tests.serving.core.mutations.registry import Patch, mutation, replaced, replacing


@mutation(67)
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


@mutation(68)
@replacing(RowReplay, "publish_boundary")
def published_anchor_stays_own(whole, self, *boundary, **later):
    whole(self, *boundary, **later)
    if self._read_only:
        self._own.insert(0, self._read_only)
        self._read_only = 0


@mutation(69)
@replacing(RowReplay, "reserve_decode")
def anchor_before_settle(whole, self, *step):
    access = whole(self, *step)
    if access is not None and access.reaches:
        self._current, self._position = access.writes[0], access.reaches
    return access


@mutation(70)
@replacing(RowReplay, "reserve_decode")
def anchor_let_go(whole, self, *step):
    access = whole(self, *step)
    if self._read_only:
        self._cache.slots.release(self._read_only)
        self._read_only = 0
    return access


@mutation(72)
@replacing(RowReplay, "resume_from")
def resumed_position_rounded(whole, self, slot, position):
    whole(self, slot, position - position % self._interval)


@mutation(73)
@replacing(RowReplay, "reserve_decode")
def written_over_with_drafts(whole, self, count, *rest):
    access = whole(self, count, *rest)
    if access is not None and access.room < count:
        return ReplayAccess(access.read, access.anchor, count, access.writes[0], access.reaches)
    return access


@mutation(74)
@replacing(RowReplay, "trim")
def no_slot_besides_the_anchor(whole, self, after):
    keep = {self._anchor_slot(after), self._current, *(after.writes if after is not None else ())}
    for slot in [slot for slot in self._own if slot not in keep]:
        self._disown(slot)
        self._cache.slots.release(slot)


@mutation(75)
def short_end_decodes(patch: Patch) -> None:
    patch.setattr(SchedulerConfig, "known_tokens_in_decode_row", property(lambda self: 1 + self.num_speculative_tokens))


@mutation(76)
@replacing(RowReplay, "reserve_decode")
def leased_too_late(whole, self, count, shortest, longest, *rest):
    return whole(self, count, shortest, shortest, *rest)


@mutation(77)
@replacing(RowReplay, "advance_chunk")
def chunk_end_forgotten(whole, self, access, position):
    whole(self, access, self._position)


@mutation(80)
@replacing(RowReplay, "advance")
def begins_on_multiple(whole, self, access, before, kept):
    begins = before == access.reaches > 0
    return whole(self, access, before - begins, kept + begins)


@mutation(81)
@replacing(RowReplay, "advance")
def old_checkpoint_kept(whole, self, access, before, kept):
    if self._read_only:
        self._cache.slots.retain(self._read_only)
    return whole(self, access, before, kept)


# -- one expression in the place of a function --

replaced(66, RowReplay, "trim", lambda whole, self, after: whole(self, None))
replaced(71, RowReplay, "advance", lambda whole, self, access, before, kept: whole(self, access, before, access.room))
replaced(78, RowReplay, "trim", lambda whole, self, after: None)
replaced(79, RowReplay, "advance", lambda whole, self, access, before, kept: len(self._own) > 1)
