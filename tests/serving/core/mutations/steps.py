"""What a step tells the device, what becomes of its tokens, who goes on, and who waits or makes room."""

import dataclasses

import pytest

from serving.core import scheduler
from serving.core.cache.cache import Cache
from serving.core.cache.retention import RetentionPolicy
from serving.core.cache.row_forms import ReplayAccess, RowReplay, RowSnapshots
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_state import RowState, StateAccess
from serving.core.config import SchedulerConfig
from serving.core.planning import admission, rows
from serving.core.planning.fairness import Fairness
from serving.core.planning.plan import Budget, DecodeRow, PrefillRow
from serving.core.planning.state import SchedulerState
from serving.core.requests.queues import Queues
from serving.core.requests.request import Request, ResultDisposition, Status
from tests.serving.core.mutations.registry import Patch, mutation, replacing

# -- rows --


@mutation(6, RowState, "reserve_chunk")
def relative_tiles(whole, self, start, end, unit, *rest, **more):
    access = whole(self, start, end, unit, *rest, **more)
    if access is None or not access.writes:
        return access
    writes = [0] * len(access.writes)
    for each in self._publications:
        writes[(each.position - start - 1) // unit] = each.slot
    writes[-1] = access.writes[-1]
    return StateAccess(access.read, writes)


@mutation(22, SchedulerState, "forget")
def stale_anchor(whole, self, request):
    before = getattr(request, "progress", None)
    whole(self, request)
    if before is not None:
        request.progress.num_sampling_steps = before.num_sampling_steps


@mutation(23, scheduler, "plan_prefill", admission)
def first_token_decodes(whole, host, request, step, *rest, **more):
    reason = whole(host, request, step, *rest, **more)
    row = request.progress.unsettled[-1] if reason is None else None
    if isinstance(row, PrefillRow) and row.length == 0 and row.num_tokens == 1:
        step.remove(row)
        fields = {field.name: getattr(row, field.name) for field in dataclasses.fields(row)}
        new = DecodeRow(**fields)
        request.progress.unsettled[-1] = new
        step.decode.append(new)
        step.effects.append(new)
    return reason


@mutation(25, scheduler, "plan_decode")
def shortest_length(whole, host, request, *rest):
    done = whole(host, request, *rest)
    if done >= 0:
        progress = request.progress
        progress.pages.return_surplus(progress.num_computed + len(progress.unsettled))
    return done


@mutation(26, RowSnapshots, "trim")
def trim_what_is_read(whole, self, after):
    while len(self._own) > self._cache.width:
        slot = self._own[-1]
        self._disown(slot)
        self._cache.slots.release(slot)


@mutation(30, Budget, "__init__")
def no_tile_budget(whole, self, config):
    whole(self, config)
    self.tiles = 10**6


@mutation(34, SchedulerState, "reach")
def drafts_beyond_the_end(whole, self, request, end):
    return end + self.config.num_speculative_tokens + self.config.page_size


@mutation(43, admission, "_admit_one")
def shared_row_id(whole, host, request, plan, room):
    reason, running = whole(host, request, plan, room), host.queues.running
    if reason is None and len(running) > 1:
        progress = request.progress
        progress.row_id = progress.unsettled[-1].row_id = running[0].progress.row_id
    return reason


# -- results --


@mutation(28, rows, "_settle_known")
def credit_the_dead(whole, host, row, tokens, emitted):
    if row.sample and row.fate is ResultDisposition.DROPPED and row.request.finished:
        accepted, _ = rows.append(row.request, tokens)
        emitted.append(rows.RowResult(row.request, row, accepted))
        return
    whole(host, row, tokens, emitted)


@mutation(39, scheduler.Scheduler, "settle")
def late_results(whole, self, plan, result):
    if plan in self.unsettled:
        return whole(self, plan, result)
    for row, tokens in zip(plan.rows, (*result.decode, *result.prefill), strict=True):
        if row.request.status is Status.WAITING:
            rows.append(row.request, tokens)
    return []


@mutation(44, rows, "_settle_known")
def detached_tokens_twice(whole, host, row, tokens, emitted):
    detached = row.fate is ResultDisposition.DETACHED and row.request.status is Status.WAITING
    whole(host, row, tokens, emitted)
    if detached and not row.request.finished:
        whole(host, row, tokens, emitted)


@mutation(49, rows, "append")
def stop_too_early(whole, request, tokens):
    kept, request.min_tokens = request.min_tokens, 0
    try:
        return whole(request, tokens)
    finally:
        request.min_tokens = kept


# -- who goes on --


@mutation(29, rows, "_chunk_end")
def align_or_nothing(whole, host, request, start, room):
    end = whole(host, request, start, room)
    if end < len(request.tokens) and end not in request.progress.stops and host.config.cache_mode == "align":
        return max(start, end - end % host.config.state_block_size)
    return end


@mutation(33)
def boundaries_first(patch: Patch) -> None:
    def choose_unkept(whole, self, count, after):
        kept = after.boundary if after is not None else ()
        stuck = all(slot in kept for slot in self._own) and not self._cache.slots.available
        return [] if stuck else whole(self, count, after)

    def publish_last_slot(whole, self, *boundary, **later):
        # Without looking whether the row keeps a slot to write.
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Cache, "can_spare_slot", lambda self, *, admitting=False: True)
            whole(self, *boundary, **later)

    replacing(RowSnapshots, "_choose")(choose_unkept)(patch)
    replacing(RowSnapshots, "publish_boundary")(publish_last_slot)(patch)


@mutation(59, SchedulerState, "preempt_later")
def wrong_victim(whole, self, request, plan):
    victims = [other for other in self.queues.running if other is not request]
    if victims:
        self.preempt(victims[0], plan)
    return bool(victims)


@mutation(82)
def no_sitting_out(patch: Patch) -> None:
    patch.setattr(Request, "sits_out", False)


@mutation(83, scheduler.Scheduler, "needs_settle_before_schedule")
def neighbors_wait(whole, self):
    drafting = self.config.num_speculative_tokens > 0
    held = any(request.lockstep and request.progress.unsettled for request in self.queues.running)
    return whole(self) or (drafting and held)


@mutation(92, Queues, "admitted")
def clients_begin_first(whole, self, request):
    whole(self, request)
    self._turn = 0


@mutation(90, Fairness, "fed")
def turns_without_use(whole, self, num_tokens, with_quota, step):
    whole(self, num_tokens, with_quota, step)
    self._served |= dict.fromkeys(with_quota, step)


@mutation(91, Fairness, "fed")
def turns_forgotten(whole, self, *step):
    whole(self, *step)
    self._served = {client: at for client, at in self._served.items() if client in self._deficits}


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


@mutation(68, RowReplay, "publish_boundary")
def published_anchor_stays_own(whole, self, *boundary, **later):
    whole(self, *boundary, **later)
    if self._read_only:
        self._own.insert(0, self._read_only)
        self._read_only = 0


@mutation(69, RowReplay, "reserve_decode")
def anchor_before_settle(whole, self, *step):
    access = whole(self, *step)
    if access is not None and access.reaches:
        self._current, self._position = access.writes[0], access.reaches
    return access


@mutation(70, RowReplay, "reserve_decode")
def anchor_let_go(whole, self, *step):
    access = whole(self, *step)
    if self._read_only:
        self._cache.slots.release(self._read_only)
        self._read_only = 0
    return access


@mutation(73, RowReplay, "reserve_decode")
def written_over_with_drafts(whole, self, count, *rest):
    access = whole(self, count, *rest)
    if access is not None and access.room < count:
        return ReplayAccess(count, access.writes[0], access.reaches)
    return access


@mutation(74, RowReplay, "trim")
def no_slot_besides_the_anchor(whole, self, after):
    keep = {self._anchor_slot(after), self._current, *(after.writes if after is not None else ())}
    for slot in [slot for slot in self._own if slot not in keep]:
        self._disown(slot)
        self._cache.slots.release(slot)


@mutation(75)
def short_end_decodes(patch: Patch) -> None:
    patch.setattr(SchedulerConfig, "known_tokens_in_decode_row", property(lambda self: 1 + self.num_speculative_tokens))


@mutation(80, RowReplay, "advance")
def begins_on_multiple(whole, self, access, before, kept):
    begins = before == access.reaches > 0
    return whole(self, access, before - begins, kept + begins)


@mutation(81, RowReplay, "advance")
def old_checkpoint_kept(whole, self, access, before, kept):
    if self._read_only:
        self._cache.slots.retain(self._read_only)
    return whole(self, access, before, kept)


# -- one expression in the place of a function --

mutation(24, RowSnapshots, "advance")(lambda whole, self, access, before, kept: whole(self, access, before, 1))
mutation(31, SchedulerState, "preempt_later")(lambda whole, self, request, plan: False)
mutation(32, RowPages, "_unshare")(lambda whole, self, pool: None)
mutation(50, RowState, "_read_slot")(lambda whole, self, after: self._current or whole(self, after))
mutation(51, Budget, "grant_share")(lambda whole, self: None)
mutation(56, admission, "_waits_for_sibling")(lambda whole, host, request: False)
mutation(57, RetentionPolicy, "stops")(lambda whole, self, length, hit, _, marks: whole(self, length, hit, 0, marks))
mutation(58, RetentionPolicy, "stops")(lambda whole, self, length, hit, matched, marks: [])
mutation(64, rows, "_fits_decode_row")(lambda _, host, request, start, n: start > 0 and n <= host.cache.width)
mutation(66, RowReplay, "trim")(lambda whole, self, after: whole(self, None))
mutation(71, RowReplay, "advance")(lambda whole, self, access, before, kept: whole(self, access, before, access.room))
mutation(76, RowReplay, "reserve_decode")(lambda whole, self, n, least, _, *rest: whole(self, n, least, least, *rest))
mutation(78, RowReplay, "trim")(lambda whole, self, after: None)
mutation(79, RowReplay, "advance")(lambda whole, self, access, before, kept: len(self._own) > 1)
