"""Applies a step's result: adds tokens to requests, publishes boundaries, and releases surplus slots and pages."""

from collections.abc import Sequence

from serving.core.planning.host_state import HostState
from serving.core.planning.plan import DecodeRow, Row, RowResult, StepPlan, StepResult
from serving.core.planning.publication import after_settle
from serving.core.reasons import FinishReason
from serving.core.requests.request import Request, ResultDisposition, Status


def settle(host: HostState, plan: StepPlan, result: StepResult) -> list[RowResult]:
    """Assigns the emitted tokens of a step to its rows. Returns the valid results by request."""
    emitted: list[RowResult] = []
    assert len(result.decode) == len(plan.decode), "a result has one entry per row"
    assert len(result.prefill) == len(plan.prefill), "a result has one entry per row"
    drafted = result.drafted or [row.num_drafts for row in plan.decode]
    host.stats.drafted_tokens += sum(drafted)
    for row, tokens, made in zip(plan.decode, result.decode, drafted, strict=True):
        if row.fate is not ResultDisposition.LIVE:
            _settle_dead(host, row, tokens, emitted)
        elif row.is_prefill:
            _settle_prefill(host, row, tokens, emitted)
        else:
            _settle_decode(host, row, tokens, made, emitted)
    for prefill_row, tokens in zip(plan.prefill, result.prefill, strict=True):
        if prefill_row.fate is not ResultDisposition.LIVE:
            _settle_dead(host, prefill_row, tokens, emitted)
        else:
            _settle_prefill(host, prefill_row, tokens, emitted)
    return emitted


def _settle_decode(host: HostState, row: DecodeRow, tokens: Sequence[int], made: int, emitted: list[RowResult]) -> None:
    """Settles a row that continued on the device (the hot path). It keeps its last token and the accepted drafts.

    made: actual number of drafts; the source may have made fewer than were planned.
    """
    request, stats = row.request, host.stats
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
        host.drafts.observe(request, made, kept - 1)
    if after >= progress.publish_at and host.cache.index is not None:
        after_settle(host, row, before, after)
    if finished is not None:
        finish(host, request, finished)
        return
    config = host.config
    if config.num_speculative_tokens:
        end = after + (unsettled[0].num_tokens if unsettled else 0) + config.num_lookahead_tokens
        if (len(progress.pages.table) - 1) * config.page_size >= end:
            host.return_surplus(request)
    if surplus:
        state.trim(progress.last_access)


def _settle_prefill(host: HostState, row: Row, tokens: Sequence[int], emitted: list[RowResult]) -> None:
    """Settles a row whose tokens were all known. Its state was published when the step was dispatched."""
    request, progress = row.request, row.request.progress
    assert progress.unsettled[0] is row, "steps must settle in the order in which they were dispatched"
    del progress.unsettled[0]
    if row.num_tokens:
        progress.num_computed += row.num_tokens
        progress.state.advance_chunk(row.access, progress.num_computed)
    if not row.sample:
        return
    accepted, finished = append(request, tokens)
    emitted.append(RowResult(request, row, accepted))
    host.stats.output_tokens += len(accepted)
    if finished is not None:
        finish(host, request, finished)


def _settle_dead(host: HostState, row: Row, tokens: Sequence[int], emitted: list[RowResult]) -> None:
    """Settles a row whose request has ended, or was preempted and waits. A waiting request keeps the tokens; its state
    is lost."""
    request = row.request
    if row.fate is not ResultDisposition.DETACHED or not row.sample or request.status is not Status.WAITING:
        return
    accepted, finished = append(request, tokens)
    host.stats.output_tokens += len(accepted)
    emitted.append(RowResult(request, row, accepted))
    if finished is not None:
        finish(host, request, finished)


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


def finish(host: HostState, request: Request, reason: FinishReason) -> None:
    """Ends a request in any status. It releases its slots and pages, and its unsettled rows are ignored."""
    host.queues.leave(request)
    host.drop_remote(request)
    if request.status is Status.RUNNING:
        host.release_all(request, ResultDisposition.DROPPED)
    for plan in host.unsettled:
        for row in plan.rows:
            if row.request is request:
                row.fate = ResultDisposition.DROPPED
    request.status = Status.FINISHED
    request.finish_reason = reason
    del host.queues.unfinished[request.request_id]
    host.stats.finished[reason] += 1
