"""What becomes findable, and when."""

from typing import Any

from serving.core import CheckpointKind, DecodeRow, StateAccess, scheduler
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.planning import admission, rows, settlement
from serving.core.requests.request import ResultDisposition
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(1, "a prompt's states and pages are published when its step is planned", "A16 B9 B12")
def publish_when_planned(patch: Patch) -> None:
    whole = rows.plan_prefill

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> Any:
        reason = whole(host, request, step, room, preempting=preempting)
        if reason is None and request.progress.state.publishing():
            row = request.progress.unsettled[-1]
            settlement.after_dispatch(host, row)
            step.effects.remove(row)
        return reason

    patch.setattr(scheduler, "plan_prefill", plan)
    patch.setattr(admission, "plan_prefill", plan)


@mutation(2, "the slot of a step's first token is published for the boundary", "A7 A9 B7")
def first_slot_for_boundary(patch: Patch) -> None:
    whole = RowSnapshots.publish_boundary

    def publish(self: Any, access: StateAccess, nth: int, *rest: Any, **later: Any) -> None:
        if access.writes[nth] in access.boundary and access.writes[0] in self._own:
            access, nth = StateAccess(access.read, access.writes, access.writes), 0
        whole(self, access, nth, *rest, **later)

    patch.setattr(RowSnapshots, "publish_boundary", publish)


@mutation(3, "rejected drafts count as confirmed when pages and boundaries are published", "A2 B7")
def drafts_published(patch: Patch) -> None:
    whole = settlement.after_settle

    def publish(host: Any, row: DecodeRow, before: int, after: int) -> None:
        fed = before + row.num_tokens
        lost = fed - len(row.request.tokens)
        row.request.tokens += [1] * max(0, lost)
        try:
            whole(host, row, before, fed)
        finally:
            if lost > 0:
                del row.request.tokens[-lost:]

    patch.setattr(settlement, "after_settle", publish)


@mutation(4, "no second set of slots while an unsettled step may hold a boundary", "A7 A10 B7")
def no_second_set(patch: Patch) -> None:
    whole = RowSnapshots.reserve_decode

    def reserve(self: Any, count: int, shortest: int, longest: int, continues: bool, after: Any) -> Any:
        return whole(self, count, shortest, longest, continues, None)

    patch.setattr(RowSnapshots, "reserve_decode", reserve)


@mutation(5, "a prompt's end is published under one token fewer than its state absorbed", "B9 B13")
def published_early(patch: Patch) -> None:
    whole = PrefixIndex.publish_state

    def publish(self: Any, content: Any, position: int, slot: int, kind: CheckpointKind) -> bool:
        early = kind == CheckpointKind.PROMPT_END and position > 1
        return whole(self, content, position - early, slot, kind)

    patch.setattr(PrefixIndex, "publish_state", publish)


@mutation(7, "a withdrawn step's publications stay", "B12 B14")
def publish_withdrawn(patch: Patch) -> None:
    whole = scheduler.Scheduler.withdraw

    def withdraw(self: Any, plan: Any) -> None:
        for row in plan.effects:
            if row.fate is ResultDisposition.LIVE:
                settlement.after_dispatch(self, row)
        whole(self, plan)

    patch.setattr(scheduler.Scheduler, "withdraw", withdraw)


@mutation(8, "a page is published for the very last token, which need not have one", "A23 A24")
def publish_without_page(patch: Patch) -> None:
    whole = settlement.after_settle

    def after_settle(host: Any, row: Any, before: int, after: int) -> None:
        row.request.max_total += 1
        try:
            whole(host, row, before, after)
        finally:
            row.request.max_total -= 1

    patch.setattr(settlement, "after_settle", after_settle)


@mutation(45, "a drafting row's pages are published up to what was fed when it is dispatched", "A2 B9 invariant 3")
def decode_published_at_dispatch(patch: Patch) -> None:
    whole = rows.plan_decode

    def plan(host: Any, request: Any, step: Any, *rest: Any) -> int:
        done = whole(host, request, step, *rest)
        if done >= 0:
            row = request.progress.unsettled[-1]
            if row not in step.effects:
                step.effects.append(row)
        return done

    inner = settlement.after_dispatch

    def after(host: Any, row: Any) -> None:
        inner(host, row)
        tokens, progress = row.request.tokens, row.request.progress
        if not row.is_prefill and host.cache.index is not None and progress.pages.publishes_at(row.end):
            missing = row.end - len(tokens)
            tokens += [1] * max(0, missing)
            try:
                host.cache.index.publish_pages(progress.content, row.end)
            finally:
                if missing > 0:
                    del tokens[-missing:]

    patch.setattr(scheduler, "plan_decode", plan)
    patch.setattr(scheduler, "after_dispatch", after)


@mutation(
    60,
    "decode publishes no boundaries",
    "A15",
    "test_hits:test_second_turn_hits_a_block_finished_while_decoding_with_three_drafts",
)
def no_decode_boundaries(patch: Patch) -> None:
    patch.setattr(RowSnapshots, "publish_boundary", lambda self, *boundary, **later: None)
