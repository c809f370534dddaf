"""Anchors, spares and what lies between them."""

from typing import Any

from serving.core import SchedulerConfig
from serving.core.cache.row_replay import ReplayAccess, RowReplay
from serving.core.cache.row_state import RowState
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(66, "a spare is given back although an unsettled step may have written it", "replay: accounts")
def spare_given_back(patch: Patch) -> None:
    whole = RowReplay.trim
    patch.setattr(RowReplay, "trim", lambda self, after: whole(self, None))


@mutation(67, "a spare is leased to two rows", "replay: two owners")
def spare_leased_twice(patch: Patch) -> None:
    last: dict[int, int] = {}

    def lease(self: Any) -> int:
        pool, before = self._cache.slots, last.get(id(self._cache), 0)
        free = before and pool.refs[before] == 1 and pool.owners[before] is None and before not in self._own
        if free and len(self._own) == 1:
            pool.retain(before)
            self._own.append(before)
            return before
        slot = whole(self)
        last[id(self._cache)] = slot
        return slot

    whole = RowReplay.lease
    patch.setattr(RowReplay, "lease", lease)


@mutation(68, "a published anchor stays the row's own, and is written", "replay: invariant 2")
def published_anchor_stays_own(patch: Patch) -> None:
    whole = RowReplay.publish_boundary

    def publish(self: Any, *boundary: Any, **later: Any) -> None:
        whole(self, *boundary, **later)
        if self._read_only:
            self._own.insert(0, self._read_only)
            self._read_only = 0

    patch.setattr(RowReplay, "publish_boundary", publish)


@mutation(69, "the host takes a spare for the anchor before the step that writes it has settled", "replay: settle")
def anchor_before_settle(patch: Patch) -> None:
    whole = RowReplay.reserve_decode

    def reserve(self: Any, *step: Any) -> Any:
        access = whole(self, *step)
        if access is not None and access.reaches:
            self._current, self._anchor = access.writes[0], access.reaches
        return access

    patch.setattr(RowReplay, "reserve_decode", reserve)


@mutation(70, "a checkpoint is let go once a step has read it, though it is the anchor still", "replay: anchors")
def anchor_let_go(patch: Patch) -> None:
    whole = RowReplay.reserve_decode

    def reserve(self: Any, *step: Any) -> Any:
        access = whole(self, *step)
        if self._read_only:
            self._cache.slots.release(self._read_only)
            self._read_only = 0
        return access

    patch.setattr(RowReplay, "reserve_decode", reserve)


@mutation(71, "all drafts count as kept when the host moves its anchor", "replay: rejected drafts")
def anchor_from_rejected_drafts(patch: Patch) -> None:
    whole = RowReplay.advance
    patch.setattr(RowReplay, "advance", lambda self, access, before, kept: whole(self, access, before, access.room))


@mutation(72, "a row resumes from a position rounded down to a multiple of R", "replay: resumed position")
def resumed_position_rounded(patch: Patch) -> None:
    whole = RowReplay.resume_from

    def resume(self: Any, slot: int, position: int) -> None:
        whole(self, slot, position - position % self._interval)

    patch.setattr(RowReplay, "resume_from", resume)


@mutation(73, "a row writes over its anchor though its drafts may be rejected", "replay: no spare")
def written_over_with_drafts(patch: Patch) -> None:
    whole = RowReplay.reserve_decode

    def reserve(self: Any, count: int, *rest: Any) -> Any:
        access = whole(self, count, *rest)
        if access is not None and access.room < count:
            return ReplayAccess(access.read, access.anchor, count, access.writes[0], access.reaches)
        return access

    patch.setattr(RowReplay, "reserve_decode", reserve)


@mutation(74, "no slot is kept in addition to a checkpoint that is the anchor", "replay: no spare")
def no_slot_besides_the_anchor(patch: Patch) -> None:
    def trim(self: Any, after: Any) -> None:
        keep = {self._anchor_slot(after), self._current, *(after.writes if after is not None else ())}
        for slot in [slot for slot in self._own if slot not in keep]:
            self._disown(slot)
            self._cache.slots.release(slot)

    patch.setattr(RowReplay, "trim", trim)


@mutation(75, "a prompt's short end is fed by a decode row, which stores no state for it", "replay: chunks")
def short_end_decodes(patch: Patch) -> None:
    patch.setattr(SchedulerConfig, "known_tokens_in_decode_row", property(lambda self: 1 + self.num_speculative_tokens))


@mutation(76, "the spare is leased only when the multiple of R is reached for certain", "replay: leased late")
def leased_too_late(patch: Patch) -> None:
    whole = RowReplay.reserve_decode

    def reserve(self: Any, count: int, shortest: int, longest: int, *rest: Any) -> Any:
        return whole(self, count, shortest, shortest, *rest)

    patch.setattr(RowReplay, "reserve_decode", reserve)


@mutation(77, "the end of a chunk is not taken for the anchor's position", "replay: anchors")
def chunk_end_forgotten(patch: Patch) -> None:
    whole = RowState.advance_chunk
    patch.setattr(RowReplay, "advance_chunk", lambda self, access, position: whole(self, access, position))


@mutation(78, "old anchors are never given back", "replay: accounts")
def anchors_kept(patch: Patch) -> None:
    patch.setattr(RowReplay, "trim", lambda self, after: None)


@mutation(79, "the anchor stays where it was although a multiple of R was passed", "replay: anchors")
def anchor_left_behind(patch: Patch) -> None:
    def advance(self: Any, access: Any, before: int, kept: int) -> bool:
        return len(self._own) > 1

    patch.setattr(RowReplay, "advance", advance)


@mutation(80, "a step that begins on a multiple of R is thought to have reached it", "replay: a == c")
def begins_on_multiple(patch: Patch) -> None:
    whole = RowReplay.advance

    def advance(self: Any, access: Any, before: int, kept: int) -> bool:
        begins = before == access.reaches > 0
        return whole(self, access, before - begins, kept + begins)

    patch.setattr(RowReplay, "advance", advance)


@mutation(81, "the checkpoint that a row has moved on from is never given back", "replay: accounts")
def old_checkpoint_kept(patch: Patch) -> None:
    whole = RowReplay.advance

    def advance(self: Any, access: Any, before: int, kept: int) -> bool:
        held = self._read_only
        if held:
            self._cache.slots.retain(held)
        return whole(self, access, before, kept)

    patch.setattr(RowReplay, "advance", advance)
