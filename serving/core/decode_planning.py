"""Rows that go on by themselves: the last token, and drafts for the ones after it, are on the device already."""

from collections.abc import Sequence

from serving.core.budget import Budget
from serving.core.host_state import HostState
from serving.core.page_planning import prepare_pages, put_back
from serving.core.plan import DecodeRow, StepPlan
from serving.core.request import Request


def plan_decode(host: HostState, request: Request, plan: StepPlan, budget: Budget, spare: int) -> int:
    """Give a decoding request its next step, with at most `spare` drafts; returns how many it got (-1: no step).

    While an earlier step of the row has not settled, its length lies in [shortest, longest]: pages are reserved for the
    longest, and slots that may hold a multiple of B for any length in between are kept until that step settles.
    """
    if not budget.decode_rows or budget.tokens <= 0:
        host.stats.rows_stalled += 1
        return -1
    flights = request.flights
    known = len(request.tokens)
    longest = shortest = request.num_computed
    if flights:
        flight = flights[-1]
        longest += flight.num_tokens
        shortest = longest - flight.num_drafts
        known += 1
    room = request.max_total - known
    if room <= 0:
        # The unsettled step brings its last token.
        return -1
    config = host.config
    drafts = 0
    if config.num_speculative_tokens:
        drafts = host.drafts.wanted(request)
        drafts = max(0, min(drafts, config.num_speculative_tokens, room - 1, spare, budget.tokens - 1))
        if request.draft_tokens is not None and not flights:
            drafts = min(drafts, len(request.draft_tokens))

    page_copy = None
    reach = longest + 1 + drafts
    if request.shared_page >= 0 or len(request.pages) * config.page_size < reach + config.num_lookahead_tokens:
        ready, page_copy = prepare_pages(host, request, reach, plan, preempting=True)
        if not ready:
            host.stats.rows_stalled += 1
            return -1

    state = request.state
    if len(state.own) > drafts and not (flights and flights[-1].boundary_slots):
        write_slots: Sequence[int] = state.own[: 1 + drafts]
    else:
        write_slots = host.choose_slots(request, 1 + drafts)
        if not write_slots:
            put_back(host, request, page_copy)
            host.stats.rows_stalled += 1
            return -1
        if len(write_slots) <= drafts:
            host.stats.drafts_cut += drafts + 1 - len(write_slots)
            drafts = len(write_slots) - 1

    continues = request.draft_tokens is None or bool(flights)
    row = DecodeRow(
        request,
        request.row_id,
        continues,
        () if continues else (request.tokens[-1], *(request.draft_tokens or ())[:drafts]),
        longest,
        state.current,
        1 + drafts,
        drafts,
        write_slots,
        request.pages,
        page_copy,
        True,
        plan.step,
    )
    if host.index is not None:
        block = config.state_block_size
        boundary = shortest - shortest % block + block
        if boundary <= longest + 1 + drafts:
            row.boundary_slots = _boundary_slots(write_slots, shortest, longest, boundary, block)
    if page_copy is not None:
        row.shared_page = request.pages.index(page_copy[1])
    if state.held:
        row.release_slot, state.held = state.held, 0
    if page_copy is not None or row.release_slot:
        plan.effects.append(row)
    request.num_sampling_steps += 1
    flights.append(row)
    plan.decode.append(row)
    budget.decode_rows -= 1
    budget.tokens -= 1 + drafts
    return drafts


def _boundary_slots(slots: Sequence[int], shortest: int, longest: int, boundary: int, block: int) -> Sequence[int]:
    """Those of a step's slots in which a multiple of B lands for some length in [shortest, longest]."""
    count = len(slots)
    found: list[int] = []
    while boundary <= longest + count:
        found += slots[max(0, boundary - longest - 1) : max(0, boundary - shortest)]
        boundary += block
    return found
