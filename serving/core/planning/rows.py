"""Plans one row of a step: of a request that continues on the device, or of one whose next tokens are all known.

The first kind has its last token and the drafts after it on the device. The second kind is a prompt, or output whose
state a preemption discarded.
"""

from serving.core.errors import WaitReason
from serving.core.planning.plan import Budget, DecodeRow, PrefillRow, StepPlan
from serving.core.planning.state import SchedulerState
from serving.core.requests.request import Request, Status


def plan_decode(scheduler: SchedulerState, request: Request, plan: StepPlan, budget: Budget, spare: int) -> int:
    """Give a decoding request its next step, with at most `spare` drafts; returns how many it got (-1: no step).

    While an earlier step of the row has not settled, its length lies in [shortest, longest]: pages are reserved for the
    longest, and the row's state is reserved for any length in between.
    """
    if not budget.decode_rows or budget.tokens <= 0:
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
    draft_tokens = request.draft_tokens
    drafts = 0
    if config.num_speculative_tokens:
        drafts = scheduler.drafts.wanted(request)
        drafts = max(0, min(drafts, config.num_speculative_tokens, room - 1, spare, budget.tokens - 1))
        if draft_tokens is not None and not unsettled:
            drafts = min(drafts, len(draft_tokens))

    pages = progress.pages
    reach = longest + 1 + drafts
    short = len(pages.table) * config.page_size < reach + config.num_lookahead_tokens
    if (short or pages.shared >= 0) and not scheduler.prepare_pages(request, reach, plan, preempting=True):
        scheduler.counters.rows_stalled += 1
        return -1

    state = progress.state
    continues = draft_tokens is None or after is not None
    access = state.reserve_decode(1 + drafts, shortest, longest, continues, after)
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
        continues,
        () if continues else (request.tokens[-1], *(draft_tokens or ())[:drafts]),
    )
    if state.leaving or pages.copy is not None:
        plan.effects.append(row)
    progress.num_sampling_steps += 1
    unsettled.append(row)
    plan.decode.append(row)
    budget.decode_rows -= 1
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
    if not (budget.decode_rows if as_decode else budget.prefill_rows) or (end <= start < len(request.tokens)):
        scheduler.counters.rows_stalled += 1
        return WaitReason.STEP
    writes = num_tokens or scheduler.config.num_lookahead_tokens
    if writes and not scheduler.prepare_pages(request, end, plan, preempting=preempting):
        scheduler.counters.rows_stalled += 1
        return WaitReason.MEMORY
    after = progress.last_access
    if num_tokens:
        access = state.reserve_chunk(
            start,
            end,
            1 if as_decode else scheduler.config.tile_size,
            scheduler.policy.positions(request.prompt_len, progress.stops, start, end, request.marks),
            after=after,
            admitting=request.status is Status.WAITING,
        )
        if access is None:
            pages.undo()
            scheduler.counters.rows_stalled += 1
            return WaitReason.SLOTS
    else:
        access = state.read_again(after)
    sample = end == len(request.tokens)
    whole = (request, progress.row_id, start, num_tokens, 0, access, pages.table, pages.copy, sample, True, plan.step)
    row: DecodeRow | PrefillRow
    if as_decode:
        row = DecodeRow(*whole, False, request.tokens[start:end])
        budget.decode_rows -= 1
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
    """Whether tokens from `start` on are few enough for a decode row, and may be fed by one."""
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
