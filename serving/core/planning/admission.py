"""Admits requests from the queue: prefix lookup, row id, and first chunk."""

import itertools
from collections import Counter
from collections.abc import Iterable

from serving.core.cache.prefix_tree import Match
from serving.core.planning.fairness import MOST_OVERTAKEN
from serving.core.planning.host_state import HostState
from serving.core.planning.plan import Budget, StepPlan
from serving.core.planning.preemption import preempt
from serving.core.planning.prefill import plan_prefill
from serving.core.planning.remote import remote_is_unneeded, reserve
from serving.core.reasons import MissReason, RequestError, WaitReason, check_prompt_length
from serving.core.requests.request import RemoteState, Request, ResultDisposition
from serving.core.tiers.content import Chain

DISPLACE_AFTER = 16
"""Steps that a request waits for a row, first in turn, before a choice of another request makes room for it."""
MOST_DISPLACEMENTS = 4
"""Maximum number of times that one choice is displaced."""
_LOOK_AGAIN = 8
"""Number of steps after which a request that did not fit is looked up again while free memory is low."""


def refuse_impossible(host: HostState, request: Request) -> None:
    """Sets the request's limits. Raises `RequestError` if the request can never run, or if the queue is full."""
    config = host.config
    if request.request_id in host.queues.unfinished:
        raise RequestError(f"request id {request.request_id!r} is in use: ids of unfinished requests must differ")
    if not request.prompt_len:
        raise RequestError("the prompt is empty: at least one token is needed")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: it must be at least 1")
    check_prompt_length(request.prompt_len, config.max_model_len)
    request.max_total = min(config.max_model_len, request.prompt_len + request.max_tokens)
    if config.num_pages and -(-(request.max_total - 1) // config.page_size) > config.num_pages - 1:
        raise RequestError(
            f"the request may reach {request.max_total} tokens: the {config.num_pages - 1} pages of "
            f"{config.page_size} tokens hold {(config.num_pages - 1) * config.page_size + 1} at most"
        )
    waiting = host.queues.waiting
    # Further choices of requests fill the queue for other choices only: a first choice finds room next to them.
    if (config.max_waiting is not None and len(waiting) >= config.max_waiting) and (
        _is_further(request) or sum(not _is_further(each) for each in waiting) >= config.max_waiting
    ):
        raise RequestError(f"{config.max_waiting} requests are waiting: the queue is full, try later", retry=True)


def admit(host: HostState, plan: StepPlan, budget: Budget) -> None:
    """Admits waiting requests in order while there is room. Stops at the first that does not fit.

    It only skips requests that may not start yet, and long prompts if enough of them are being prefilled. If
    a row was just preempted, no request is admitted, because the room is needed.
    """
    overtaken = 0
    room = host.fairness.room_for_long(host.queues.running)
    for request in host.queues.in_turn():
        if plan.preempted or not host.queues.free_row_ids:
            return
        if _is_passed_over(host, request):
            continue
        long = host.fairness.is_long(request)
        if long and room <= 0:
            overtaken += 1
            if overtaken == MOST_OVERTAKEN:
                return
        elif not _admit_one(host, request, plan, budget):
            return
        else:
            room -= long


def admit_short(host: HostState, plan: StepPlan, budget: Budget) -> None:
    """Admits short requests before long ones of the queue, while there is room."""
    priority = host.queues.waiting[0].priority
    for request in itertools.islice(host.queues.in_turn(), MOST_OVERTAKEN):
        if plan.preempted or not host.queues.free_row_ids or request.priority != priority:
            return
        if host.fairness.is_long(request) or _is_passed_over(host, request):
            continue
        if not _admit_one(host, request, plan, budget):
            return


def displace(host: HostState, plan: StepPlan) -> None:
    """If all rows are taken, makes room for a request that has waited for a while and has far fewer rows than another.

    A client with at least two rows more than the request's own has to give one up; or, of the same client, a request
    with at least two choices running more than this one. Each choice is displaced a few times at most.
    """
    queues = host.queues
    clients = Counter(each.client for each in queues.running)
    flows = Counter(map(_flow, queues.running))
    largest: dict[str | None, int] = {}  # requests by client
    for (client, _), rows in flows.items():
        largest[client] = max(largest.get(client, 0), rows)
    largest_clients = clients.most_common(2)
    for request in itertools.islice(queues.in_turn(), MOST_OVERTAKEN):
        of_others = next((rows for client, rows in largest_clients if client != request.client), 0)
        if of_others < clients[request.client] + 2 and largest.get(request.client, 0) < flows[_flow(request)] + 2:
            continue
        if _is_passed_over(host, request):
            continue
        if request.queueing.waits_since is None:
            request.queueing.waits_since = plan.step
        if plan.step - request.queueing.waits_since < DISPLACE_AFTER:
            continue
        candidates = [each for each in queues.running if _gives_way(each, request, clients, flows)]
        if not candidates:
            continue
        victim = max(candidates, key=lambda each: (clients[each.client], flows[_flow(each)], each.order))
        preempt(host, victim, plan, behind=request)
        victim.queueing.num_displacements += 1
        host.stats.displacements += 1
        return


def _gives_way(
    running: Request, waiting: Request, clients: Counter[str | None], flows: Counter[tuple[str | None, str]]
) -> bool:
    """Returns whether a row of one request may be taken for another; `clients` and `flows` count their rows."""
    if running.priority < waiting.priority or running.queueing.num_displacements >= MOST_DISPLACEMENTS:
        return False
    if running.client != waiting.client:
        return clients[running.client] >= clients[waiting.client] + 2
    return flows[_flow(running)] >= flows[_flow(waiting)] + 2


def _flow(request: Request) -> tuple[str | None, str]:
    """Fields that all choices of a call share."""
    return request.client, request.flow


def _is_further(request: Request) -> bool:
    """Whether it is a choice of a call after the first."""
    return request.flow != request.request_id


def _is_passed_over(host: HostState, request: Request) -> bool:
    """Returns whether a request may not start yet, for a reason other than room."""
    return request.blocked or host.holds_back(request) or _waits_for_sibling(host, request)


def why_wait(host: HostState, requests: Iterable[Request]) -> list[WaitReason]:
    """Returns the reason why each of some waiting requests has not been admitted. Changes nothing."""
    room = host.fairness.room_for_long(host.queues.running)

    def why(request: Request) -> WaitReason:
        if host.holds_back(request):
            return WaitReason.PAUSED
        if request.transfer.load is not None:
            return WaitReason.STATE
        if _waits_for_sibling(host, request):
            return WaitReason.SIBLING
        if request.blocked:
            return WaitReason.BLOCKED
        if not host.queues.free_row_ids:
            return WaitReason.ROWS
        if room <= 0 and host.fairness.is_long(request):
            return WaitReason.LONG_PROMPTS
        return WaitReason.MEMORY if request.queueing.retry_above >= 0 else WaitReason.TURN

    return [why(request) for request in requests]


def _waits_for_sibling(host: HostState, request: Request) -> bool:
    """Returns whether a fork should wait until its first sibling has published the prompt's end.

    It waits only while the sibling is certain to do so: it is unfinished, and has not reached its prompt's end before.
    """
    if request.fork_of is None or host.cache.index is None or request.prompt_logprobs or request.queueing.prompt_done:
        return False
    sibling = host.queues.unfinished.get(request.fork_of)
    return (
        sibling is not None and sibling is not request and not sibling.queueing.prompt_done and sibling.fork_of is None
    )


def _admit_one(host: HostState, request: Request, plan: StepPlan, budget: Budget) -> bool:
    """Looks the prompt up, and takes a row id, a slot and the first chunk's pages. Returns False, and keeps nothing,
    without room."""
    queues, queueing, pool = host.queues, request.queueing, host.cache.pages
    if pool is not None and queues.running and pool.available <= queueing.retry_above:
        return False
    cramped = budget.tokens < budget.share
    if cramped and plan.step < queueing.retry_at:
        return False
    match = _find(host, request)
    if remote_is_unneeded(request, match):
        host.drop_remote(request)
    elif request.transfer.remote is not None:
        return reserve(host, request, match)
    elif (held := _held(host, request, match)) is not None:
        request.transfer.remote = held
        if reserve(host, request, match):
            return True
        request.transfer.remote = None  # looked up again: it may be gone by then
        return False
    _take_hit(host, request, match)
    progress = request.progress
    if cramped and budget.tokens < len(request.tokens) - progress.num_computed:
        # A tiny chunk saves less than a later cache hit might. Lookups have a cost, too.
        host.release_all(request, ResultDisposition.DROPPED)
        queueing.retry_at = plan.step + _LOOK_AGAIN
        return False
    # All of the prompt, though the first chunk needs less, and a page for each row that runs already to grow by:
    # a request that is admitted only to be preempted has gained nothing.
    growth = len(queues.running)
    if pool is not None and growth and progress.pages.missing(len(request.tokens)) + growth > pool.available:
        host.release_all(request, ResultDisposition.DROPPED)
        queueing.retry_above = pool.available
        return False
    if not progress.state.lease():
        # Only while other rows run: a pool of one slot publishes nothing, a larger one has a slot besides the hit's.
        host.release_all(request, ResultDisposition.DROPPED)
        return False
    progress.row_id = queues.free_row_ids.pop()
    matched = match.matched if match is not None else 0
    progress.stops = host.policy.stops(request.prompt_len, progress.num_computed, matched)
    if not plan_prefill(host, request, plan, budget, preempting=False):
        host.release_all(request, ResultDisposition.DROPPED)
        return False
    if match is not None and match.entry is not None and host.cache.index is not None:
        host.cache.index.touch(match.entry)
    _explain(host, request, match, plan)
    queues.admitted(request)
    request.queueing.waits_since = None
    plan.admitted.append(request)
    return True


def _find(host: HostState, request: Request) -> Match | None:
    """The cached prefix of a request; None if the request may not use the cache."""
    if host.cache.index is None or request.prompt_logprobs:
        return None
    return host.cache.index.find(request.tokens, request.progress.content.scope)


def _held(host: HostState, request: Request, match: Match | None) -> RemoteState | None:
    """The longer prefix that a tier below the device has, if fetching it is worthwhile."""
    if host.tiers is None or match is None:
        return None
    lookup, tokens = request.lookup, request.tokens
    scope = request.progress.content.scope
    if lookup.chain is None or lookup.chain.scope != scope:
        lookup.chain = Chain(scope, host.tiers.block)
    matched = match.matched if host.cache.pages is not None else 0
    held = host.tiers.find(lookup.chain, tokens, match.position, matched)
    if held is None:
        return None
    position = held.unit.position
    return RemoteState(position, host.tiers.source, cached_tokens=min(position, request.prompt_len), held=held)


def _take_hit(host: HostState, request: Request, match: Match | None) -> None:
    """References the matching state and the pages up to it, so that they cannot be evicted."""
    if match is None or match.entry is None:
        return
    entry, index, progress = match.entry, host.cache.index, request.progress
    assert index is not None
    progress.state.resume_from(entry.slot, entry.position)
    progress.pages.resume_from(match.path[: entry.position // index.unit], entry)
    progress.num_computed = entry.position


def _explain(host: HostState, request: Request, match: Match | None, plan: StepPlan) -> None:
    """Returns the cached tokens of a request at its first admission, or the reason for none."""
    lookup, found = request.lookup, request.progress.num_computed
    if lookup.final:
        return
    lookup.num_cached_tokens = min(found, request.prompt_len)
    lookup.miss_reason = None
    if found:
        return
    if host.cache.index is None:
        lookup.miss_reason = MissReason.CACHING_OFF
    elif match is None:
        lookup.miss_reason = MissReason.PROMPT_LOGPROBS
    elif _being_written(request, plan):
        lookup.miss_reason = MissReason.NOT_YET_WRITTEN
    else:
        lookup.miss_reason = host.cache.index.why_missed(request.tokens, request.progress.content.scope, match)


def _being_written(request: Request, plan: StepPlan) -> bool:
    """Returns whether another row of this step will publish a state that the request could have used."""
    for row in plan.effects:
        other = row.request
        same_scope = (other.cache_salt, other.adapter) == (request.cache_salt, request.adapter)
        if other is request or not same_scope or not row.is_prefill:
            continue
        for position in other.progress.state.publishing():
            if position <= len(request.tokens):
                if request.tokens[:position] == other.tokens[:position]:
                    return True
                break
    return False
