"""From the queue to a seat: the prefix lookup, and the first chunk."""

from serving.core.budget import Budget
from serving.core.host_state import HostState
from serving.core.plan import Fate, StepPlan
from serving.core.prefill_planning import plan_catch_up
from serving.core.prefix_tree import Match
from serving.core.reasons import MissReason, RequestRefused
from serving.core.remote import forsake_remote, reserve, spares_remote
from serving.core.request import Request

_LOOK_AGAIN = 8
"""Steps after which a request that did not fit is looked up again while there is little room."""


def refuse_impossible(host: HostState, request: Request) -> None:
    """Raise `RequestRefused` for what can never run, or may not queue now; else set the request's limits."""
    config = host.config
    if request.request_id in host.requests:
        raise RequestRefused(f"request id {request.request_id!r} is in use: ids of unfinished requests must differ")
    if not request.prompt_len:
        raise RequestRefused("the prompt is empty: at least one token is needed")
    if request.max_tokens < 1:
        raise RequestRefused(f"max_tokens is {request.max_tokens}: it must be at least 1")
    if request.prompt_len >= config.max_model_len:
        raise RequestRefused(
            f"the prompt has {request.prompt_len} tokens: with max_model_len {config.max_model_len} "
            f"it may have at most {config.max_model_len - 1}"
        )
    request.max_total = min(config.max_model_len, request.prompt_len + request.max_tokens)
    if host.pages is not None and host.pages_for(request.max_total - 1) > config.num_pages - 1:
        raise RequestRefused(
            f"the request may reach {request.max_total} tokens: the {config.num_pages - 1} pages of "
            f"{config.page_size} tokens hold {(config.num_pages - 1) * config.page_size + 1} at most"
        )
    if config.max_waiting is not None and len(host.waiting) >= config.max_waiting:
        raise RequestRefused(f"{config.max_waiting} requests are waiting: the queue is full, try later", retry=True)


def admit(host: HostState, plan: StepPlan, budget: Budget) -> None:
    """Seat waiting requests in order while there is room. The first that does not fit ends it: nobody overtakes.

    Only forks that wait for their first sibling's prompt end are passed over. Where a row was just preempted, nobody
    is seated: the room is needed.
    """
    at = 0
    while not plan.preempted and host.free_seats and at < len(host.waiting):
        request = host.waiting[at]
        if _waits_for_sibling(host, request):
            at += 1
        elif not _seat(host, request, plan, budget):
            return


def _waits_for_sibling(host: HostState, request: Request) -> bool:
    """Whether a fork should wait until the first of its siblings has put the prompt's end into the index.

    Only while that one is sure to get there: it is unfinished, and has not been there before.
    """
    if request.fork_of is None or host.index is None or request.prompt_logprobs or request.prompt_done:
        return False
    sibling = host.requests.get(request.fork_of)
    return sibling is not None and sibling is not request and not sibling.prompt_done and sibling.fork_of is None


def _seat(host: HostState, request: Request, plan: StepPlan, budget: Budget) -> bool:
    """Look the prompt up; take a seat, a slot and the first chunk's pages. False, with nothing kept, if not all fit."""
    pages = host.pages
    if pages is not None and host.running and pages.available <= request.retry_above:
        return False
    cramped = budget.tokens < budget.share
    if cramped and plan.step < request.retry_at:
        return False
    match = _find(host, request)
    if spares_remote(request, match):
        forsake_remote(host, request)
    elif request.remote is not None:
        return reserve(host, request, match)
    _take_hit(host, request, match)
    if cramped and budget.tokens < len(request.tokens) - request.num_computed:
        # A crumb of a chunk is worth less than what a later step may find in the cache. Looking is not free either.
        host.release_all(request, Fate.DROPPED)
        request.retry_at = plan.step + _LOOK_AGAIN
        return False
    if pages is not None and host.running:
        # All of the prompt, though the first chunk needs less, and a page for each row that runs already to grow by:
        # seated only to be preempted helps nobody.
        need = host.pages_for(len(request.tokens)) - len(request.pages) + (request.shared_page >= 0)
        if need + len(host.running) > pages.available:
            host.release_all(request, Fate.DROPPED)
            request.retry_above = pages.available
            return False
    slot = host.slots.take()
    if not slot:
        # Never so while nothing runs: a pool of one slot publishes nothing, and any other has one beside the hit's.
        host.release_all(request, Fate.DROPPED)
        return False
    request.state.own.append(slot)
    request.row_id = host.free_seats.pop()
    matched = match.matched if match is not None else 0
    request.stops = host.policy.stops(request, request.num_computed, matched)
    if not plan_catch_up(host, request, plan, budget, preempting=False):
        host.release_all(request, Fate.DROPPED)
        return False
    if match is not None and match.entry is not None and host.index is not None:
        host.index.touch(match.entry)
    _explain(host, request, match, plan)
    host.leave(request)
    host.enter(request)
    plan.seats.append(request)
    return True


def _find(host: HostState, request: Request) -> Match | None:
    """What the cache has of a request; None where it may not look."""
    if host.index is None or request.prompt_logprobs:
        return None
    return host.index.find(request.tokens, request.cache_salt)


def _take_hit(host: HostState, request: Request, match: Match | None) -> None:
    """Reference the state that was found and the pages up to it: nothing of it can go from now on."""
    if match is None or match.entry is None:
        return
    entry, index = match.entry, host.index
    assert index is not None
    host.slots.retain(entry.slot)
    request.state.held = request.state.current = entry.slot
    request.num_computed = entry.position
    if host.pages is None:
        return
    path = match.path[: entry.position // index.unit]
    for node in path:
        host.pages.retain(node.page)
        request.pages.append(node.page)
    request.num_published = len(path)
    request.node = path[-1] if path else None
    if entry.page:
        host.pages.retain(entry.page)
        request.pages.append(entry.page)
        request.shared_page = len(path)


def _explain(host: HostState, request: Request, match: Match | None, plan: StepPlan) -> None:
    """How much a request found at its first admission, or why nothing."""
    if request.counted:
        return
    request.num_cached_tokens = min(request.num_computed, request.prompt_len)
    request.miss_reason = None
    if request.num_computed:
        return
    if host.index is None:
        request.miss_reason = MissReason.CACHING_OFF
    elif match is None:
        request.miss_reason = MissReason.PROMPT_LOGPROBS
    elif _being_written(request, plan):
        request.miss_reason = MissReason.NOT_YET_WRITTEN
    else:
        request.miss_reason = host.index.why_missed(request.tokens, request.cache_salt, match)


def _being_written(request: Request, plan: StepPlan) -> bool:
    """Whether another row of this step will publish a state that the request could have used."""
    for row in plan.effects:
        other = row.request
        if other is request or other.cache_salt != request.cache_salt or not row.catching_up:
            continue
        for mark in row.marks:
            if mark.position <= len(request.tokens):
                if request.tokens[: mark.position] == other.tokens[: mark.position]:
                    return True
                break
    return False
