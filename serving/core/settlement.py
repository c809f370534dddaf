"""A step's result has arrived: tokens to the requests, boundaries to the index, surplus to the pools."""

from collections.abc import Sequence

from serving.core.host_state import HostState, writes
from serving.core.plan import DecodeRow, Emitted, Fate, Row, StepPlan, StepResult
from serving.core.publication import after_settle
from serving.core.reasons import FinishReason
from serving.core.remote import forsake_remote
from serving.core.request import Request, Status


def settle(host: HostState, plan: StepPlan, result: StepResult) -> list[Emitted]:
    """Credit each row of a step with what it emitted; returns what counts, request by request."""
    emitted: list[Emitted] = []
    assert len(result.decode) == len(plan.decode), "a result has one entry per row"
    assert len(result.prefill) == len(plan.prefill), "a result has one entry per row"
    if host.config.num_speculative_tokens:
        host.stats.drafted_tokens += sum(result.drafted or [row.num_drafts for row in plan.decode])
    for i, (row, tokens) in enumerate(zip(plan.decode, result.decode, strict=True)):
        if row.fate is not Fate.LIVE:
            _settle_dead(host, row, tokens, emitted)
        elif row.catching_up:
            _settle_catch_up(host, row, tokens, emitted)
        else:
            _settle_decode(host, row, tokens, emitted, made=result.drafted[i] if result.drafted else row.num_drafts)
    for prefill_row, tokens in zip(plan.prefill, result.prefill, strict=True):
        if prefill_row.fate is not Fate.LIVE:
            _settle_dead(host, prefill_row, tokens, emitted)
        else:
            _settle_catch_up(host, prefill_row, tokens, emitted)
    return emitted


def _settle_decode(
    host: HostState, row: DecodeRow, tokens: Sequence[int], emitted: list[Emitted], *, made: int
) -> None:
    """The hot path: a row that went on by itself. Its fed tokens are its last one and the drafts that were accepted.

    `made` drafts there were; the source may have had fewer than were planned.
    """
    request, config, stats = row.request, host.config, host.stats
    flights, state = request.flights, request.state
    assert flights[0] is row, "steps must settle in the order in which they were dispatched"
    del flights[0]
    kept = len(tokens)
    before = request.num_computed
    request.num_computed = after = before + kept
    state.current = row.write_slots[kept - 1]
    accepted, finished = append(request, tokens)
    emitted.append(Emitted(request, row, accepted))
    stats.output_tokens += len(accepted)
    stats.decode_tokens += 1
    if row.num_drafts:
        stats.accepted_tokens += kept - 1
        host.drafts.observe(request, made, kept - 1)
    if host.index is not None and (
        before // config.state_block_size != after // config.state_block_size
        or (host.pages is not None and after // config.page_size > request.num_published)
    ):
        after_settle(host, row, before, after)
    if finished is not None:
        finish(host, request, finished)
        return
    if host.width > 1:
        flying = flights[0].num_tokens if flights else 0
        if (len(request.pages) - 1) * config.page_size >= after + flying + config.num_lookahead_tokens:
            host.return_surplus(request)
    if len(state.own) > host.width:
        host.trim_slots(request)


def _settle_catch_up(host: HostState, row: Row, tokens: Sequence[int], emitted: list[Emitted]) -> None:
    """A row all of whose tokens were known: it was published when it was dispatched."""
    request = row.request
    assert request.flights[0] is row, "steps must settle in the order in which they were dispatched"
    del request.flights[0]
    if row.num_tokens:
        request.num_computed += row.num_tokens
        request.state.current = writes(row)[-1]
    if not row.sample:
        return
    accepted, finished = append(request, tokens)
    emitted.append(Emitted(request, row, accepted))
    host.stats.output_tokens += len(accepted)
    if finished is not None:
        finish(host, request, finished)


def _settle_dead(host: HostState, row: Row, tokens: Sequence[int], emitted: list[Emitted]) -> None:
    """A row whose request has ended, or was preempted and waits: then its tokens count, though its state is gone."""
    request = row.request
    if row.fate is not Fate.DETACHED or not row.sample or request.status is not Status.WAITING:
        return
    accepted, finished = append(request, tokens)
    host.stats.output_tokens += len(accepted)
    emitted.append(Emitted(request, row, accepted))
    if finished is not None:
        finish(host, request, finished)


def append(request: Request, tokens: Sequence[int]) -> tuple[Sequence[int], FinishReason | None]:
    """Add a step's tokens up to the first that ends the request; returns those added, and why it ended if it did."""
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
    """End a request wherever it is, at any moment: nothing of it stays in use, nothing it has under way counts."""
    host.leave(request)
    forsake_remote(host, request)
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
