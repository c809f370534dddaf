"""Plans rows whose tokens are all known: prompts, and outputs whose state a preemption discarded."""

from serving.core.planning.host_state import HostState
from serving.core.planning.plan import Budget, DecodeRow, PrefillRow, StepPlan
from serving.core.planning.preemption import prepare_pages
from serving.core.requests.request import Request, Status


def plan_prefill(host: HostState, request: Request, plan: StepPlan, budget: Budget, *, preempting: bool) -> bool:
    """Give a request that does not yet decode its next chunk; False if there is no room for it in this step.

    The chunk is a decode row if it has a prior state and fits one (at most 1 + K tokens), and a prefill row otherwise:
    decided from (c, q), and from whether log-probabilities of prompt tokens are asked for, which decode steps have not.
    """
    progress = request.progress
    state, pages, unsettled = progress.state, progress.pages, progress.unsettled
    start = progress.num_computed + (unsettled[-1].num_tokens if unsettled else 0)
    end = _chunk_end(host, request, start, budget)
    num_tokens = end - start
    as_decode = _fits_decode_row(host, request, start, num_tokens)
    if not (budget.decode_rows if as_decode else budget.prefill_rows) or (end <= start < len(request.tokens)):
        host.stats.rows_stalled += 1
        return False
    writes = num_tokens or host.config.num_lookahead_tokens
    if writes and not prepare_pages(host, request, end, plan, preempting=preempting):
        host.stats.rows_stalled += 1
        return False
    after = progress.last_access
    if num_tokens:
        policy, prompt_len = host.policy, request.prompt_len
        access = state.reserve_chunk(
            start,
            end,
            1 if as_decode else host.config.tile_size,
            [
                (position, kind, policy.is_low_value(prompt_len, position, kind))
                for position, kind in policy.positions(prompt_len, progress.stops, start, end)
            ],
            after=after,
            admitting=request.status is Status.WAITING,
        )
        if access is None:
            pages.undo()
            host.stats.rows_stalled += 1
            return False
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
    return True


def _fits_decode_row(host: HostState, request: Request, start: int, num_tokens: int) -> bool:
    """Whether tokens from `start` on are few enough for a decode row, and may be fed by one."""
    reports = request.prompt_logprobs and start < request.prompt_len
    return start > 0 and num_tokens <= host.config.known_tokens_in_decode_row and not reports


def _chunk_end(host: HostState, request: Request, start: int, budget: Budget) -> int:
    """Where the next chunk ends: at most what fits, and at a place from which others can profit.

    `align` ends chunks on multiples of B; a prompt's last chunk is cut at the last of them. Where B exceeds what fits,
    a smaller chunk goes on to the next multiple as the room allows. The other modes only end on tiles, to fill them.
    """
    config = host.config
    tile = config.tile_size
    stops = request.progress.stops
    target = len(request.tokens)
    room = budget.tokens
    if not _fits_decode_row(host, request, start, target - start):
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
