"""One row of a step, from its plan to its settlement.

A row is of a request that continues on the device, with its last token and the drafts after it there, or of one whose
next tokens are all known: a prompt, or output whose state a preemption discarded.

A prefill is published when its step has been dispatched: its tokens are known, and any reader's step runs later. A
decode row is published when its step has settled, which confirms its tokens. Publishing a state moves its slot from the
row to the index, without a copy.
"""

from collections.abc import Sequence

from serving.core.errors import FinishReason, WaitReason
from serving.core.planning.plan import Budget, DecodeRow, PrefillRow, Row, RowResult, StepPlan, StepResult
from serving.core.planning.state import SchedulerState
from serving.core.requests.request import PlannedRow, Request, ResultDisposition, Status


def plan_decode(scheduler: SchedulerState, request: Request, plan: StepPlan, budget: Budget, spare: int) -> int:
    """Give a decoding request its next step, with at most `spare` drafts; returns how many it got (-1: no step).

    While an earlier step of the row has not settled, its length lies in [shortest, longest]: pages are reserved for the
    longest, and the row's state is reserved for any length in between.
    """
    if budget.tokens <= 0:
        scheduler.counters.rows_stalled += 1
        return -1
    progress = request.progress
    unsettled = progress.unsettled
    known = len(request.tokens)
    longest = shortest = progress.num_computed
    after = None
    if unsettled:
        last = unsettled[-1]
        longest += last.num_tokens
        shortest = longest - last.num_drafts
        known += 1
        after = last.access
    room = request.max_total - known
    if room <= 0:
        # The unsettled step brings its last token.
        return -1
    config = scheduler.config
    drafts = 0
    if config.num_speculative_tokens:
        drafts = scheduler.drafts.wanted(request)
        drafts = max(0, min(drafts, config.num_speculative_tokens, room - 1, spare, budget.tokens - 1))

    pages = progress.pages
    reach = longest + 1 + drafts
    short = len(pages.table) * config.page_size < reach + config.num_lookahead_tokens
    if (short or pages.shared >= 0) and not scheduler.prepare_pages(request, reach, plan, preempting=True):
        scheduler.counters.rows_stalled += 1
        return -1

    state = progress.state
    access = state.reserve_decode(1 + drafts, shortest, longest, after)
    if access is None:
        pages.undo()
        scheduler.counters.rows_stalled += 1
        return -1
    if access.room <= drafts:
        scheduler.counters.drafts_cut += drafts + 1 - access.room
        drafts = access.room - 1

    row = DecodeRow(
        request,
        progress.row_id,
        longest,
        1 + drafts,
        drafts,
        access,
        pages.table,
        pages.copy,
        True,
        False,
        plan.step,
    )
    if state.leaving or pages.copy is not None:
        plan.effects.append(row)
    progress.num_sampling_steps += 1
    unsettled.append(row)
    plan.decode.append(row)
    budget.tokens -= 1 + drafts
    return drafts


def plan_prefill(
    scheduler: SchedulerState, request: Request, plan: StepPlan, budget: Budget, *, preempting: bool
) -> WaitReason | None:
    """Give a request that does not yet decode its next chunk. Returns the reason if this step has no room.

    The chunk is a decode row if it has a prior state and fits one (at most 1 + K tokens), and a prefill row otherwise:
    decided from (c, q), and from whether log-probabilities of prompt tokens are asked for, which decode steps have not.
    """
    progress = request.progress
    state, pages, unsettled = progress.state, progress.pages, progress.unsettled
    start = progress.num_computed + (unsettled[-1].num_tokens if unsettled else 0)
    end = _chunk_end(scheduler, request, start, budget)
    num_tokens = end - start
    as_decode = _fits_decode_row(scheduler, request, start, num_tokens)
    if not (as_decode or budget.prefill_rows) or (end <= start < len(request.tokens)):
        scheduler.counters.rows_stalled += 1
        return WaitReason.STEP
    writes = num_tokens or scheduler.config.num_lookahead_tokens
    if writes and not scheduler.prepare_pages(request, end, plan, preempting=preempting):
        scheduler.counters.rows_stalled += 1
        return WaitReason.MEMORY
    access = state.reserve_chunk(
        start,
        end,
        1 if as_decode else scheduler.config.tile_size,
        scheduler.cache.policy.positions(request.prompt_len, progress.stops, start, end, request.marks),
        after=progress.last_access,
        admitting=request.status is Status.WAITING,
    )
    if access is None:
        pages.undo()
        scheduler.counters.rows_stalled += 1
        return WaitReason.SLOTS
    sample = end == len(request.tokens)
    whole = (request, progress.row_id, start, num_tokens, 0, access, pages.table, pages.copy, sample, True, plan.step)
    row: DecodeRow | PrefillRow
    if as_decode:
        row = DecodeRow(*whole)
        plan.decode.append(row)
    else:
        row = PrefillRow(*whole)
        budget.prefill_rows -= 1
        budget.tiles -= len(access.writes)
        plan.prefill.append(row)
    budget.tokens -= num_tokens
    progress.num_sampling_steps += sample
    unsettled.append(row)
    plan.effects.append(row)
    return None


def _fits_decode_row(scheduler: SchedulerState, request: Request, start: int, num_tokens: int) -> bool:
    reports = request.prompt_logprobs and start < request.prompt_len
    return start > 0 and num_tokens <= scheduler.config.known_tokens_in_decode_row and not reports


def _chunk_end(scheduler: SchedulerState, request: Request, start: int, budget: Budget) -> int:
    """Where the next chunk ends: at most what fits, and at a place from which others can profit.

    `align` ends chunks on multiples of B; a prompt's last chunk is cut at the last of them. Where B exceeds what fits,
    a smaller chunk goes on to the next multiple as the room allows. The other modes only end on tiles, to fill them.
    """
    config = scheduler.config
    tile = config.tile_size
    stops = request.progress.stops
    target = len(request.tokens)
    room = budget.tokens
    if not _fits_decode_row(scheduler, request, start, target - start):
        room = min(room, (start // tile + budget.tiles) * tile - start)
    end = min(target, start + room)
    if config.chunks_end_at_blocks:
        end = min(end, start - start % config.state_block_size + config.state_block_size)
    for stop in stops:
        if stop > start:
            end = min(end, stop)
            break
    is_stop = end == target or end in stops
    if config.cache_mode == "align":
        aligned = end - end % config.state_block_size
        if (not is_stop or end == request.prompt_len or end == target) and start < aligned:
            return aligned
    if not is_stop:
        filled = end - end % tile
        if start < filled:
            return filled
    return end


def settle(scheduler: SchedulerState, plan: StepPlan, result: StepResult) -> list[RowResult]:
    """Assigns the emitted tokens of a step to its rows. Returns the valid results by request."""
    emitted: list[RowResult] = []
    assert len(result.decode) == len(plan.decode), "a result has one entry per row"
    assert len(result.prefill) == len(plan.prefill), "a result has one entry per row"
    drafted = result.drafted or [row.num_drafts for row in plan.decode]
    scheduler.counters.drafted_tokens += sum(drafted)
    for row, tokens, made in zip(plan.decode, result.decode, drafted, strict=True):
        if row.fate is ResultDisposition.LIVE and not row.is_prefill:
            _settle_decode(scheduler, row, tokens, made, emitted)
        else:
            _settle_known(scheduler, row, tokens, emitted)
    for prefill_row, tokens in zip(plan.prefill, result.prefill, strict=True):
        _settle_known(scheduler, prefill_row, tokens, emitted)
    return emitted


def _settle_decode(
    scheduler: SchedulerState, row: DecodeRow, tokens: Sequence[int], made: int, emitted: list[RowResult]
) -> None:
    """Settles a row that continued on the device (the hot path). It keeps its last token and the accepted drafts.

    made: actual number of drafts; the source may have made fewer than were planned.
    """
    request, stats = row.request, scheduler.counters
    progress = request.progress
    unsettled, state = progress.unsettled, progress.state
    assert unsettled[0] is row, "steps must settle in the order in which they were dispatched"
    del unsettled[0]
    kept = len(tokens)
    before = progress.num_computed
    progress.num_computed = after = before + kept
    surplus = state.advance(row.access, before, kept)
    accepted, finished = append(request, tokens)
    emitted.append(RowResult(request, row, accepted))
    stats.output_tokens += len(accepted)
    stats.decode_tokens += 1
    if row.num_drafts:
        stats.accepted_tokens += kept - 1
        scheduler.drafts.observe(request, made, kept - 1)
    if after >= progress.publish_at and scheduler.cache.index is not None:
        after_settle(scheduler, row, before, after)
    if finished is not None:
        finish(scheduler, request, finished)
        return
    config = scheduler.config
    if config.num_speculative_tokens:
        end = after + (unsettled[0].num_tokens if unsettled else 0) + config.num_lookahead_tokens
        if (len(progress.pages.table) - 1) * config.page_size >= end:
            scheduler.return_surplus(request)
    if surplus:
        state.trim(progress.last_access)


def _settle_known(scheduler: SchedulerState, row: Row, tokens: Sequence[int], emitted: list[RowResult]) -> None:
    """Settles a row whose tokens were all known, or whose request has ended or was preempted.

    The state of known tokens was published when the step was dispatched. A preempted request that waits keeps the
    tokens; its state is lost.
    """
    request, progress = row.request, row.request.progress
    if row.fate is ResultDisposition.LIVE:
        assert progress.unsettled[0] is row, "steps must settle in the order in which they were dispatched"
        del progress.unsettled[0]
        if row.num_tokens:
            progress.num_computed += row.num_tokens
            progress.state.advance_chunk(row.access)
    elif row.fate is ResultDisposition.DROPPED or request.status is not Status.WAITING:
        return
    if not row.sample:
        return
    accepted, finished = append(request, tokens)
    emitted.append(RowResult(request, row, accepted))
    scheduler.counters.output_tokens += len(accepted)
    if finished is not None:
        finish(scheduler, request, finished)


def append(request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
    """Adds a step's tokens up to the first that ends the request. Returns the added tokens, and the reason of the end,
    if any."""
    output, stops, limit = request.output_token_ids, request.stop_token_ids, request.max_total
    for count, token in enumerate(tokens, 1):
        request.tokens.append(token)
        output.append(token)
        if token in stops and len(output) >= request.min_tokens:
            request.stop_reason = token
            return tokens[:count], FinishReason.STOP
        if len(request.tokens) >= limit:
            return tokens[:count], FinishReason.LENGTH
    return tokens, None


def finish(scheduler: SchedulerState, request: Request, reason: FinishReason) -> None:
    """Ends a request in any status. It releases its slots and pages, and its unsettled rows are ignored."""
    scheduler.queues.leave(request)
    scheduler.drop_remote(request)
    if request.status is Status.RUNNING:
        scheduler.release_all(request, ResultDisposition.DROPPED)
    for plan in scheduler.unsettled:
        for row in plan.rows:
            if row.request is request:
                row.fate = ResultDisposition.DROPPED
    request.status = Status.FINISHED
    request.finish_reason = reason
    del scheduler.queues.unfinished[request.request_id]
    scheduler.counters.finished[reason] += 1


def after_dispatch(scheduler: SchedulerState, row: PlannedRow) -> None:
    """Releases the slots and pages that the row only read, and publishes what it wrote if all its tokens were known."""
    request, progress = row.request, row.request.progress
    pages = progress.pages
    marked = request.marks.keys() & progress.state.publishing() if request.marks else ()
    progress.state.dispatched(progress.content)
    scheduler.counters.page_copies += pages.dispatched()
    if not row.is_prefill:
        return
    scheduler.counters.prefill_tokens += row.num_tokens
    if row.end >= request.prompt_len:
        request.queueing.prompt_done = True
    index = scheduler.cache.index
    if index is None:
        return
    if pages.publishes_at(row.end):
        index.publish_pages(progress.content, row.end)
    for position in marked:
        request.lookup.published[position] = request.marks[position]
    if marked:
        index.keep(request.marks, request.client, index.state_at(progress.content, max(marked)))
    progress.state.trim(progress.last_access)


def after_settle(scheduler: SchedulerState, row: PlannedRow, before: int, after: int) -> None:
    """Publishes the boundary that the kept tokens (before, after] of a decode row crossed, and its full pages."""
    cache, request, progress = scheduler.cache, row.request, row.request.progress
    index, block, pages = cache.index, cache.block, progress.pages
    assert index is not None
    # Tokens after a stop were fed, but do not belong to the sequence; and if a sequence has its
    # very last token there need not be a page.
    confirmed = min(after, len(request.tokens), request.max_total - 1)
    boundary = confirmed - confirmed % block
    if boundary > before:
        state, later, pending = progress.state, progress.unsettled[-1:], scheduler.pending
        is_pending = pending is not None and bool(later) and later[0].step == pending.step
        nth = boundary - before - 1
        state.publish_boundary(row.access, nth, progress.content, boundary, unsettled=bool(later), pending=is_pending)
        if pending is not None and state.leaving and later[0] not in pending.effects:
            pending.effects.append(later[0])
    if pages.publishes_at(confirmed):
        index.publish_pages(progress.content, confirmed)
    progress.publish_at = after - after % block + block
    if cache.pages:
        progress.publish_at = min(progress.publish_at, (pages.num_published + 1) * pages.page_size)
