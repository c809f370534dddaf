"""A step's result has arrived: tokens to the requests, boundaries to the index, surplus to the pools."""

from collections.abc import Sequence

from serving.core.host_state import HostState
from serving.core.plan import DecodeRow, Emitted, Fate, Row, StepPlan, StepResult
from serving.core.publication import after_settle
from serving.core.reasons import FinishReason
from serving.core.request import Request, Status


def settle(host: HostState, plan: StepPlan, result: StepResult) -> list[Emitted]:
    """Credit each row of a step with what it emitted; returns what counts, request by request."""
    emitted: list[Emitted] = []
    assert len(result.decode) == len(plan.decode), "a result has one entry per row"
    assert len(result.prefill) == len(plan.prefill), "a result has one entry per row"
    for row, tokens in zip(plan.rows, (*result.decode, *result.prefill), strict=True):
        if row.fate is Fate.LIVE:
            _settle_row(host, row, tokens, emitted)
        elif row.fate is Fate.DETACHED:
            _settle_detached(host, row, tokens, emitted)
    return emitted


def _settle_row(host: HostState, row: Row, tokens: Sequence[int], emitted: list[Emitted]) -> None:
    request = row.request
    flights = request.flights
    assert flights[0] is row, "steps must settle in the order in which they were dispatched"
    del flights[0]
    before = request.num_computed
    kept = row.num_tokens
    if row.sample:
        kept += len(tokens) - 1 - row.num_drafts
    request.num_computed = after = before + kept
    if row.catching_up:
        if kept:
            request.state.current = row.write_slots[-1] if isinstance(row, DecodeRow) else row.tile_write_slots[-1]
    else:
        assert isinstance(row, DecodeRow)
        request.state.current = row.write_slots[kept - 1]
        stats = host.stats
        stats.decode_tokens += 1
        stats.drafted_tokens += row.num_drafts
        stats.accepted_tokens += kept - 1
    finished = None
    if row.sample:
        accepted, finished = append(request, tokens)
        host.stats.output_tokens += len(accepted)
        emitted.append(Emitted(request, row, accepted))
    if not row.catching_up:
        config = host.config
        if host.index is not None and (
            before // config.state_block_size != after // config.state_block_size
            or (host.pages is not None and after // config.page_size > request.num_published)
        ):
            assert isinstance(row, DecodeRow)
            after_settle(host, row, before, after)
    if finished is not None:
        finish(host, request, finished)
        return
    if _reserves_optimistically(host):
        host.return_surplus(request)
    if len(request.state.own) > host.width:
        host.trim_slots(request)


def _reserves_optimistically(host: HostState) -> bool:
    """Whether steps reserve more pages than they may turn out to need."""
    return host.width > 1 and host.pages is not None


def _settle_detached(host: HostState, row: Row, tokens: Sequence[int], emitted: list[Emitted]) -> None:
    """The request was preempted meanwhile and waits: its tokens are as good as any, its state is gone."""
    request = row.request
    if not row.sample or request.status is not Status.WAITING:
        return
    accepted, finished = append(request, tokens)
    host.stats.output_tokens += len(accepted)
    emitted.append(Emitted(request, row, accepted))
    if finished is not None:
        finish(host, request, finished)


def append(request: Request, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None]:
    """Add a step's tokens up to the first that ends the request; returns those added, and why it ended if it did."""
    accepted: list[int] = []
    output = request.output_token_ids
    for token in tokens:
        accepted.append(token)
        request.tokens.append(token)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= request.min_tokens:
            request.stop_reason = token
            return accepted, FinishReason.STOP
        if len(request.tokens) >= request.max_total:
            return accepted, FinishReason.LENGTH
    return accepted, None


def finish(host: HostState, request: Request, reason: FinishReason) -> None:
    """End a request wherever it is, at any moment: nothing of it stays in use, nothing it has under way counts."""
    host.leave(request)
    if request.status is Status.RUNNING:
        pending = host.pending
        if pending is not None and request.flights and request.flights[-1].step == pending.step:
            host.forsake(request.flights[-1])
        host.release_all(request, Fate.DROPPED)
    for plan in host.unsettled:
        for row in plan.rows:
            if row.request is request:
                row.fate = Fate.DROPPED
    request.status = Status.FINISHED
    request.finish_reason = reason
    del host.requests[request.request_id]
    host.stats.finished[reason] += 1
