"""Rows that catch up: prompts, and what a preemption threw away. Every token that they feed is known."""

from serving.core.budget import Budget
from serving.core.host_state import HostState, writes
from serving.core.page_planning import prepare_pages, put_back
from serving.core.plan import DecodeRow, Mark, PrefillRow, StepPlan
from serving.core.request import Request, Status


def plan_catch_up(host: HostState, request: Request, plan: StepPlan, budget: Budget, *, preempting: bool) -> bool:
    """Give a request that does not yet decode its next chunk; False if there is no room for it in this step.

    The chunk is a decode row if it has a prior state and fits one (at most 1 + K tokens), and a prefill row otherwise:
    decided from (c, q), and from whether log-probabilities of prompt tokens are asked for, which decode steps have not.
    """
    flights = request.flights
    start = request.num_computed + (flights[-1].num_tokens if flights else 0)
    end = _chunk_end(host, request, start, budget)
    num_tokens = end - start
    as_decode = _fits_decode_row(host, request, start, num_tokens)
    if not (budget.decode_rows if as_decode else budget.prefill_rows) or (end <= start < len(request.tokens)):
        host.stats.rows_stalled += 1
        return False
    page_copy = None
    if num_tokens or host.config.num_lookahead_tokens:
        ready, page_copy = prepare_pages(host, request, end, plan, preempting=preempting)
        if not ready:
            host.stats.rows_stalled += 1
            return False
    read_slot = (writes(flights[-1])[-1] if flights else request.state.current) if start else 0
    last_slot = 0
    if num_tokens:
        slots = host.choose_slots(request, 1)
        if not slots:
            put_back(host, request, page_copy)
            host.stats.rows_stalled += 1
            return False
        last_slot = slots[0]
    marks = _marks(host, request, start, end, last_slot) if num_tokens else []
    sample = end == len(request.tokens)
    row: DecodeRow | PrefillRow
    if as_decode:
        write_slots = [0] * num_tokens
        for mark in marks:
            write_slots[mark.position - start - 1] = mark.slot
        if num_tokens:
            write_slots[-1] = last_slot
        row = DecodeRow(
            request=request,
            row_id=request.row_id,
            continues=False,
            tokens=request.tokens[start:end],
            length=start,
            read_slot=read_slot,
            num_tokens=num_tokens,
            num_drafts=0,
            write_slots=write_slots,
            pages=request.pages,
            page_copy=page_copy,
            sample=sample,
            catching_up=True,
        )
        budget.decode_rows -= 1
        plan.decode.append(row)
    else:
        tile = host.config.tile_size
        first = start // tile
        tile_slots = [0] * (-(-end // tile) - first)
        for mark in marks:
            tile_slots[-(-mark.position // tile) - first - 1] = mark.slot
        tile_slots[-1] = last_slot
        row = PrefillRow(
            request=request,
            row_id=request.row_id,
            start=start,
            num_tokens=num_tokens,
            read_slot=read_slot,
            tile_write_slots=tile_slots,
            pages=request.pages,
            page_copy=page_copy,
            sample=sample,
        )
        budget.prefill_rows -= 1
        budget.tiles -= len(tile_slots)
        plan.prefill.append(row)
    budget.tokens -= num_tokens
    row.step = plan.step
    row.marks = marks
    if page_copy is not None:
        row.shared_page = request.pages.index(page_copy[1])
    if num_tokens:
        row.release_slot, request.state.held = request.state.held, 0
    request.num_sampling_steps += sample
    request.flights.append(row)
    plan.effects.append(row)
    return True


def _fits_decode_row(host: HostState, request: Request, start: int, num_tokens: int) -> bool:
    """Whether tokens from `start` on are few enough for a decode row, and may be fed by one."""
    in_prompt = start < request.prompt_len
    return start > 0 and num_tokens <= host.width and not (request.prompt_logprobs and in_prompt)


def _chunk_end(host: HostState, request: Request, start: int, budget: Budget) -> int:
    """Where the next chunk ends: at most what fits, and at a place from which others can profit.

    `align` ends chunks on multiples of B; a prompt's last chunk is cut at the last of them. Where B exceeds what fits,
    a smaller chunk goes on to the next multiple as the room allows. The other modes only end on tiles, to fill them.
    """
    config = host.config
    tile = config.tile_size
    target = len(request.tokens)
    room = budget.tokens
    if not _fits_decode_row(host, request, start, target - start):
        room = min(room, (start // tile + budget.tiles) * tile - start)
    end = min(target, start + room)
    for stop in request.stops:
        if stop > start:
            end = min(end, stop)
            break
    is_stop = end == target or end in request.stops
    if config.cache_mode == "align":
        aligned = end - end % config.state_block_size
        if (not is_stop or end == request.prompt_len or end == target) and start < aligned:
            return aligned
    if not is_stop:
        filled = end - end % tile
        if start < filled:
            return filled
    return end


def _marks(host: HostState, request: Request, start: int, end: int, last_slot: int) -> list[Mark]:
    """The states of a chunk that are to be published, each with the slot that will hold it.

    The last one lies in the row's own slot, which then becomes everybody's: only if the row has another to write. The
    deepest get their slots first.
    """
    marks: list[Mark] = []
    slots, policy, own = host.slots, host.policy, request.state.own
    seating = int(request.status is Status.WAITING)
    for position, kind in reversed(policy.positions(request, start, end)):
        slot = 0
        if position == end:
            if len(own) == 1 and host.can_spare_slot(seating=seating):
                spare = slots.take()
                if spare:
                    own.append(spare)
            slot = last_slot if len(own) > 1 else 0
        elif host.can_spare_slot(seating=seating):
            slot = slots.take_modestly() if policy.modest(request, position, kind) else slots.take()
        if slot:
            marks.append(Mark(position, slot, kind))
        else:
            host.stats.boundaries_not_kept += 1
    # Ascending again: the index grows downwards.
    return marks[::-1]
