"""Applies a step's result: adds tokens to requests, releases surplus slots and pages, and publishes what may be read.

A prefill is published when its step has been dispatched: its tokens are known, and any reader's step runs later. A
decode row is published when its step has settled, which confirms its tokens. Publishing a state moves its
slot from the row to the index, without a copy.
"""

from collections.abc import Sequence

from serving.core.errors import FinishReason
from serving.core.planning.plan import DecodeRow, Row, RowResult, StepPlan, StepResult
from serving.core.planning.state import SchedulerState
from serving.core.requests.request import PlannedRow, Request, ResultDisposition, Status


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
            progress.state.advance_chunk(row.access, progress.num_computed)
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
        _publish_boundary(scheduler, row, boundary, boundary - before - 1)
    if pages.publishes_at(confirmed):
        index.publish_pages(progress.content, confirmed)
    progress.publish_at = after - after % block + block
    if cache.pages is not None:
        progress.publish_at = min(progress.publish_at, (pages.num_published + 1) * pages.page_size)


def _publish_boundary(scheduler: SchedulerState, row: PlannedRow, boundary: int, nth: int) -> None:
    progress, pending = row.request.progress, scheduler.pending
    state, later = progress.state, progress.unsettled[-1:]
    is_pending = pending is not None and bool(later) and later[0].step == pending.step
    state.publish_boundary(row.access, nth, progress.content, boundary, unsettled=bool(later), pending=is_pending)
    if pending is not None and state.leaving and later[0] not in pending.effects:
        pending.effects.append(later[0])
