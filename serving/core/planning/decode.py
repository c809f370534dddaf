"""Plans rows that continue on the device, which already has the last token and the drafts after it."""

from serving.core.planning.host_state import HostState
from serving.core.planning.plan import Budget, DecodeRow, StepPlan
from serving.core.planning.preemption import prepare_pages
from serving.core.requests.request import Request


def plan_decode(host: HostState, request: Request, plan: StepPlan, budget: Budget, spare: int) -> int:
    """Give a decoding request its next step, with at most `spare` drafts; returns how many it got (-1: no step).

    While an earlier step of the row has not settled, its length lies in [shortest, longest]: pages are reserved for the
    longest, and the row's state is reserved for any length in between.
    """
    if not budget.decode_rows or budget.tokens <= 0:
        host.stats.rows_stalled += 1
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
    config = host.config
    draft_tokens = request.draft_tokens
    drafts = 0
    if config.num_speculative_tokens:
        drafts = host.drafts.wanted(request)
        drafts = max(0, min(drafts, config.num_speculative_tokens, room - 1, spare, budget.tokens - 1))
        if draft_tokens is not None and not unsettled:
            drafts = min(drafts, len(draft_tokens))

    pages = progress.pages
    reach = longest + 1 + drafts
    short = len(pages.table) * config.page_size < reach + config.num_lookahead_tokens
    if (short or pages.shared >= 0) and not prepare_pages(host, request, reach, plan, preempting=True):
        host.stats.rows_stalled += 1
        return -1

    state = progress.state
    continues = draft_tokens is None or after is not None
    access = state.reserve_decode(1 + drafts, shortest, longest, continues, after)
    if access is None:
        pages.undo()
        host.stats.rows_stalled += 1
        return -1
    if access.room <= drafts:
        host.stats.drafts_cut += drafts + 1 - access.room
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
