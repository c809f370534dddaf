"""What a step tells the device."""

import dataclasses
from typing import Any

from serving.core import DecodeRow, PrefillRow, StateAccess, scheduler
from serving.core.cache import retention
from serving.core.cache.pools import Pool
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.cache.row_state import RowState
from serving.core.planning import admission, rows
from serving.core.planning.plan import Budget
from serving.core.planning.state import SchedulerState
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(6, "tiles are counted from the chunk's start instead of absolutely", "A33 A34 B8")
def relative_tiles(patch: Patch) -> None:
    whole = RowState.reserve_chunk

    def reserve(self: Any, start: int, end: int, unit: int, *rest: Any, **more: Any) -> Any:
        access = whole(self, start, end, unit, *rest, **more)
        if access is not None:
            writes = [0] * len(access.writes)
            for each in self._publications:
                writes[(each.position - start - 1) // unit] = each.slot
            writes[-1] = access.writes[-1]
            access = StateAccess(access.read, writes)
        return access

    patch.setattr(RowState, "reserve_chunk", reserve)


@mutation(22, "a preempted row keeps its anchor: the row id's next contents are continued", "A17 A18 A19")
def stale_anchor(patch: Patch) -> None:
    whole = SchedulerState.forget

    def forget(self: Any, request: Any) -> None:
        before = getattr(request, "progress", None)
        whole(self, request)
        if before is not None:
            request.progress.num_sampling_steps = before.num_sampling_steps

    patch.setattr(SchedulerState, "forget", forget)


@mutation(23, "a first token is a decode row", "A4 B13 invariant 5")
def first_token_decodes(patch: Patch) -> None:
    whole = rows.plan_prefill

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> Any:
        reason = whole(host, request, step, room, preempting=preempting)
        row = request.progress.unsettled[-1] if reason is None else None
        if isinstance(row, PrefillRow) and row.length == 0 and row.num_tokens == 1:
            step.remove(row)
            fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
            new = DecodeRow(**fields, continues=False, tokens=row.tokens)
            request.progress.unsettled[-1] = new
            step.decode.append(new)
            step.effects.append(new)
        return reason

    patch.setattr(scheduler, "plan_prefill", plan)
    patch.setattr(admission, "plan_prefill", plan)


@mutation(24, "the host takes the first slot after a step with accepted drafts", "A12 A13 B5")
def first_slot_current(patch: Patch) -> None:
    whole = RowSnapshots.advance
    patch.setattr(RowSnapshots, "advance", lambda self, access, before, kept: whole(self, access, before, 1))


@mutation(25, "pages are reserved for the shortest possible length", "A23 B3")
def shortest_length(patch: Patch) -> None:
    whole = rows.plan_decode

    def plan(host: Any, request: Any, *rest: Any) -> int:
        done = whole(host, request, *rest)
        if done >= 0:
            progress = request.progress
            progress.pages.return_surplus(progress.num_computed + len(progress.unsettled))
        return done

    patch.setattr(scheduler, "plan_decode", plan)


@mutation(26, "a slot that the device will read next is given back as surplus", "A12 B13")
def trim_what_is_read(patch: Patch) -> None:
    def trim(self: Any, after: Any) -> None:
        while len(self._own) > self._cache.width:
            slot = self._own[-1]
            self._disown(slot)
            self._cache.slots.release(slot)

    patch.setattr(RowSnapshots, "trim", trim)


@mutation(30, "the tile budget is not looked at", "issue: tile budget")
def no_tile_budget(patch: Patch) -> None:
    whole = Budget.__init__

    def init(self: Any, config: Any) -> None:
        whole(self, config)
        self.tiles = 10**6

    patch.setattr(Budget, "__init__", init)


@mutation(34, "drafts are planned beyond a request's last token, and more pages wanted than there may be", "A24")
def drafts_beyond_the_end(patch: Patch) -> None:
    def reach(self: Any, request: Any, end: int) -> int:
        return end + self.config.num_speculative_tokens + self.config.page_size

    patch.setattr(SchedulerState, "reach", reach)


@mutation(42, "the null slot and the null page are handed out", "A21 B18")
def null_handed_out(patch: Patch) -> None:
    whole = Pool.__init__

    def init(self: Any, size: int) -> None:
        whole(self, size)
        self.free.insert(0, 0)

    patch.setattr(Pool, "__init__", init)


@mutation(43, "two rows share a row id", "A20 B17")
def shared_row_id(patch: Patch) -> None:
    whole = admission._admit_one

    def admit(host: Any, request: Any, plan: Any, room: Any) -> Any:
        reason, running = whole(host, request, plan, room), host.queues.running
        if reason is None and len(running) > 1:
            progress = request.progress
            progress.row_id = progress.unsettled[-1].row_id = running[0].progress.row_id
        return reason

    patch.setattr(admission, "_admit_one", admit)


@mutation(47, "two rows of a step may be planned to write one slot", "A21 B18")
def one_slot_for_all(patch: Patch) -> None:
    whole = Pool.take

    def take(self: Any) -> int:
        fresh = whole(self)
        if fresh and self.name == "slots" and self.size > 6:
            used = [i for i in range(1, self.size) if self.refs[i] == 1 and self.owners[i] is None and i != fresh]
            if len(used) > 3:
                self.release(fresh)
                self.refs[used[0]] += 1
                return used[0]
        return fresh

    patch.setattr(Pool, "take", take)


@mutation(50, "a row goes on from the state before its unsettled chunk", "A12 B17")
def stale_chunk_state(patch: Patch) -> None:
    whole = RowState._read_slot
    patch.setattr(RowState, "_read_slot", lambda self, after: self._current or whole(self, after))


@mutation(
    57,
    "align runs over the junction of pages and states",
    "issue: align",
    "test_hits:test_align_publishes_the_junction_of_two_prompts",
)
def no_junction(patch: Patch) -> None:
    whole = retention.RetentionPolicy.stops
    patch.setattr(
        retention.RetentionPolicy, "stops", lambda self, prompt_len, hit, matched: whole(self, prompt_len, hit, 0)
    )


@mutation(
    58,
    "a resumed request runs over its prompt's end",
    "A17 issue: resume",
    "test_limits:test_a_resumed_request_stops_at_its_prompt_end",
)
def no_stop_at_prompt_end(patch: Patch) -> None:
    patch.setattr(retention.RetentionPolicy, "stops", lambda self, prompt_len, hit, matched: [])


@mutation(64, "a short prompt tail whose log-probabilities are asked for is a decode row", "invariant 5")
def reporting_tail_decodes(patch: Patch) -> None:
    def fits(host: Any, request: Any, start: int, num_tokens: int) -> bool:
        return start > 0 and num_tokens <= host.cache.width

    patch.setattr(rows, "_fits_decode_row", fits)
