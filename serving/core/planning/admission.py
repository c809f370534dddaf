"""Which waiting requests start: prefix lookup, row id and first chunk, and rows that others give up for them."""

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

from serving.core.cache.prefix_tree import Match
from serving.core.errors import MissReason, RequestError, WaitReason, check_prompt_length
from serving.core.planning.fairness import MOST_OVERTAKEN
from serving.core.planning.plan import Budget, StepPlan
from serving.core.planning.rows import plan_prefill
from serving.core.planning.state import SchedulerState, remote_is_unneeded, reserve
from serving.core.requests.request import RemoteState, Request, ResultDisposition

DISPLACE_AFTER = 16
"""Steps that a request waits for a row, first in turn, before a choice of its client's other requests makes room."""
MOST_DISPLACEMENTS = 4
"""Maximum number of times that one choice is displaced for its own client; for others, rows with fewer go first."""
_LOOK_AGAIN = 8
"""Number of steps after which a request that did not fit is looked up again while free memory is low."""


def refuse_impossible(scheduler: SchedulerState, request: Request) -> None:
    """Sets the request's limits. Raises `RequestError` if the request can never run, or if the queue is full."""
    config = scheduler.config
    if request.request_id in scheduler.queues.unfinished:
        raise RequestError(f"request id {request.request_id!r} is in use: ids of unfinished requests must differ")
    if not request.prompt_len:
        raise RequestError("the prompt is empty: at least one token is needed")
    if request.max_tokens < 1:
        raise RequestError(f"max_tokens is {request.max_tokens}: it must be at least 1")
    check_prompt_length(request.prompt_len, config.max_model_len)
    request.max_total = min(config.max_model_len, request.prompt_len + request.max_tokens)
    pages = config.usable_pages
    if config.num_pages and -(-(request.max_total - 1) // config.page_size) > pages:
        raise RequestError(
            f"the request may reach {request.max_total} tokens: the {pages} pages of "
            f"{config.page_size} tokens hold {pages * config.page_size + 1} at most"
        )
    if config.max_waiting is not None:
        _refuse_full(request, scheduler.queues.waiting, config.max_waiting)


def _refuse_full(request: Request, waiting: Sequence[Request], most: int) -> None:
    """Raises `RequestError` if the queue has no place for a request of its client.

    A named client takes at most as many places as remain free, so that no client fills the queue alone.
    """
    own = 0
    if request.client is not None and 2 * len(waiting) >= most:
        own = sum(each.client == request.client and each.flow != request.flow for each in waiting)
    # Further choices of requests fill the queue for other choices only: a first choice finds room next to them.
    full = len(waiting) >= most and (_is_further(request) or sum(not _is_further(each) for each in waiting) >= most)
    if full or (own and own >= most - len(waiting)):
        said = f"{own} of them from this client" if own else "the queue is full"
        raise RequestError(f"{len(waiting)} requests are waiting, {said}: try later", retry=True)


def admit(scheduler: SchedulerState, plan: StepPlan, budget: Budget) -> None:
    """Admits waiting requests in order while there is room. Stops at the first that does not fit.

    It only skips requests that may not start yet, clients that have used their part of the step, and long prompts if
    enough of them are being prefilled. If a row was just preempted, no request is admitted, because the room is needed.
    """
    overtaken = 0
    queues, fairness = scheduler.queues, scheduler.fairness
    long_prompts, num_clients = fairness.long_prompts(queues.running), len(queues.clients)
    for request in queues.in_turn():
        if plan.preempted or not queues.free_row_ids:
            return
        client, long = request.client, fairness.is_long(request)
        reason = reason_to_pass_over(scheduler, request)
        if reason is None and budget.is_exhausted(client):
            reason = WaitReason.STEP
            overtaken += 1
        elif reason is None and long and not fairness.may_start_long(client, long_prompts, num_clients):
            reason = WaitReason.LONG_PROMPTS
            overtaken += 1
        if reason is not None:
            scheduler.wait_reasons[request] = reason
        elif _admit_or_explain(scheduler, request, plan, budget):
            long_prompts[client] += long
        elif budget.quotas and scheduler.wait_reasons[request] is WaitReason.STEP:
            budget.quotas[client] = 0
        else:
            return
        if overtaken == MOST_OVERTAKEN:
            return


def admit_short(scheduler: SchedulerState, plan: StepPlan, budget: Budget) -> None:
    """Admits short requests before long ones of the queue, while there is room."""
    priority = scheduler.queues.waiting[0].priority
    for request in itertools.islice(scheduler.queues.in_turn(), MOST_OVERTAKEN):
        if plan.preempted or not scheduler.queues.free_row_ids or request.priority != priority:
            return
        if scheduler.fairness.is_long(request) or reason_to_pass_over(scheduler, request) is not None:
            continue
        if budget.is_exhausted(request.client):
            continue
        if not _admit_or_explain(scheduler, request, plan, budget):
            return


def _is_further(request: Request) -> bool:
    return request.flow != request.request_id


def reason_to_pass_over(scheduler: SchedulerState, request: Request) -> WaitReason | None:
    """Returns why a request may not start yet, for a reason other than room."""
    if scheduler.holds_back(request):
        return WaitReason.PAUSED
    if request.blocked:
        return WaitReason.BLOCKED
    return WaitReason.SIBLING if _waits_for_sibling(scheduler, request) else None


def _waits_for_sibling(scheduler: SchedulerState, request: Request) -> bool:
    """Returns whether a fork should wait until its first sibling has published the prompt's end.

    It waits only while the sibling is certain to do so: it is unfinished, and has not reached its prompt's end before.
    """
    if request.fork_of is None or scheduler.index is None or request.prompt_logprobs or request.queueing.prompt_done:
        return False
    sibling = scheduler.queues.unfinished.get(request.fork_of)
    return sibling not in (None, request) and not sibling.queueing.prompt_done and sibling.fork_of is None


def _admit_or_explain(scheduler: SchedulerState, request: Request, plan: StepPlan, budget: Budget) -> bool:
    with budget.of(request.client):
        reason = _admit_one(scheduler, request, plan, budget)
    if reason is not None:
        scheduler.wait_reasons[request] = reason
    return reason is None


def _admit_one(scheduler: SchedulerState, request: Request, plan: StepPlan, budget: Budget) -> WaitReason | None:
    """Looks the prompt up, and takes a row id, a slot and the first chunk's pages. If there is no room, it keeps
    nothing, and returns the reason."""
    queues, queueing, pool = scheduler.queues, request.queueing, scheduler.cache.pages
    if queues.running and pool.available <= queueing.retry_above:
        return WaitReason.MEMORY
    cramped = budget.tokens < budget.share
    if cramped and plan.step < queueing.retry_at:
        return WaitReason.STEP
    match = _find(scheduler, request)
    if remote_is_unneeded(request, match):
        scheduler.drop_remote(request)
    elif request.transfer.remote is not None:
        return reserve(scheduler, request, match)
    elif (held := _held(scheduler, request, match)) is not None:
        request.transfer.remote = held
        reason = reserve(scheduler, request, match)
        if reason is not None:
            request.transfer.remote = None  # looked up again: it may be gone by then
        return reason
    _take_hit(scheduler, request, match)
    reason = _start(scheduler, request, match, plan, budget)
    if reason is not None:
        scheduler.release_all(request, ResultDisposition.DROPPED)
        if reason is WaitReason.MEMORY:
            queueing.retry_above = pool.available
        if cramped and reason is WaitReason.STEP:
            queueing.retry_at = plan.step + _LOOK_AGAIN
        return reason
    if match is not None and match.entry is not None and scheduler.index is not None:
        scheduler.index.touch(match.entry)
        scheduler.index.keep(request.marks, request.client, match.entry)
    _explain(scheduler, request, match, plan)
    queues.admitted(request)
    request.queueing.waits_since = None
    plan.admitted.append(request)
    return None


def _start(
    scheduler: SchedulerState, request: Request, match: Match | None, plan: StepPlan, budget: Budget
) -> WaitReason | None:
    """Takes what the first chunk needs, and plans it. Returns the reason if there is no room."""
    progress, pool = request.progress, scheduler.cache.pages
    if budget.tokens < min(budget.share, len(request.tokens) - progress.num_computed):
        # A tiny chunk saves less than a later cache hit might. Lookups have a cost, too.
        return WaitReason.STEP
    # All of the prompt, though the first chunk needs less, and a page for each row that runs already to grow by:
    # a request that is admitted only to be preempted has gained nothing.
    growth = len(scheduler.queues.running)
    if pool and growth and progress.pages.missing(len(request.tokens)) + growth > pool.available:
        return WaitReason.MEMORY
    if not progress.state.lease():
        # Only while other rows run: a pool of one slot publishes nothing, a larger one has a slot besides the hit's.
        return WaitReason.SLOTS
    progress.row_id = scheduler.queues.free_row_ids.pop()
    matched = match.matched if match is not None else 0
    progress.stops = scheduler.cache.policy.stops(request.prompt_len, progress.num_computed, matched, request.marks)
    return plan_prefill(scheduler, request, plan, budget, preempting=False)


def _find(scheduler: SchedulerState, request: Request) -> Match | None:
    if scheduler.index is None or request.prompt_logprobs:
        return None
    return scheduler.index.find(request.tokens, request.progress.content.chain.scope)


def _held(scheduler: SchedulerState, request: Request, match: Match | None) -> RemoteState | None:
    """The longer prefix that a tier below the device has, if fetching it is worthwhile."""
    if scheduler.tiers is None or match is None:
        return None
    matched = match.matched if scheduler.cache.pages else 0
    held = scheduler.tiers.find(request.progress.content.chain, request.tokens, match.position, matched)
    if held is None:
        return None
    position = held.unit.position
    return RemoteState(position, scheduler.tiers.source, cached_tokens=min(position, request.prompt_len), held=held)


def _take_hit(scheduler: SchedulerState, request: Request, match: Match | None) -> None:
    """References the matching state and the pages up to it, so that they cannot be evicted."""
    if match is None or match.entry is None:
        return
    entry, index, progress = match.entry, scheduler.index, request.progress
    assert index is not None
    progress.state.resume_from(entry.slot)
    progress.pages.resume_from(match.path[: entry.position // index.unit], entry)
    progress.num_computed = entry.position


def _explain(scheduler: SchedulerState, request: Request, match: Match | None, plan: StepPlan) -> None:
    """Returns the cached tokens of a request at its first admission, or the reason for none."""
    lookup, found = request.lookup, request.progress.num_computed
    if lookup.final:
        return
    lookup.num_cached_tokens = min(found, request.prompt_len)
    if match is not None and scheduler.cache.pages:
        lookup.num_stateless_tokens = max(0, match.matched - found)
    lookup.miss_reason = None
    if found:
        return
    if scheduler.index is None:
        lookup.miss_reason = MissReason.CACHING_OFF
    elif match is None:
        lookup.miss_reason = MissReason.PROMPT_LOGPROBS
    elif _being_written(request, plan):
        lookup.miss_reason = MissReason.NOT_YET_WRITTEN
    else:
        lookup.miss_reason = scheduler.index.why_missed(request.tokens, request.progress.content.chain.scope, match)


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


# -- rows that others give up --


def displace(scheduler: SchedulerState, plan: StepPlan) -> None:
    """Makes room for a request that waits for a row, a slot or pages and has far fewer rows than another.

    A client with at least two rows more than the request's own has to give one up at once; of the same client, after a
    while, a request with at least two choices running more than this one. The next step admits the request.
    """
    queues = scheduler.queues
    flows = Counter(map(_flow, queues.running))
    largest: dict[str | None, int] = {}  # requests by client
    for (client, _), rows in flows.items():
        largest[client] = max(largest.get(client, 0), rows)
    largest_clients = queues.rows.most_common(2)
    if len(plan.rows) < 2:
        return
    for request in itertools.islice(queues.in_turn(), MOST_OVERTAKEN):
        of_others = next((rows for client, rows in largest_clients if client != request.client), 0)
        of_client = of_others >= queues.rows[request.client] + 2
        if not of_client and largest.get(request.client, 0) < flows[_flow(request)] + 2:
            continue
        if reason_to_pass_over(scheduler, request) is not None:
            continue
        lacks_memory = scheduler.wait_reasons.get(request) in (WaitReason.MEMORY, WaitReason.SLOTS)
        if queues.free_row_ids and not (of_client and lacks_memory and not scheduler.fairness.is_long(request)):
            continue
        if request.queueing.waits_since is None:
            request.queueing.waits_since = plan.step
        if not of_client and plan.step - request.queueing.waits_since < DISPLACE_AFTER:
            continue
        candidates = [
            each for each in queues.running
            if each not in plan.admitted and _gives_way(each, request, queues.rows, flows)
        ]  # fmt: skip
        if not candidates:
            continue
        victim = max(
            candidates,
            key=lambda each: (queues.rows[each.client], _may_give_way(each), flows[_flow(each)], each.order),
        )
        scheduler.preempt(victim, plan, behind=request)
        victim.queueing.num_displacements += 1
        scheduler.counters.displacements += 1
        return


def _gives_way(running: Request, waiting: Request, clients: Counter[Any], flows: Counter[Any]) -> bool:
    """Returns whether a row of one request may be taken for another; `clients` and `flows` count their rows."""
    if running.priority < waiting.priority:
        return False
    if running.client != waiting.client:
        return clients[running.client] >= clients[waiting.client] + 2
    return _may_give_way(running) and flows[_flow(running)] >= flows[_flow(waiting)] + 2


def _may_give_way(running: Request) -> bool:
    return running.queueing.num_displacements < MOST_DISPLACEMENTS


def _flow(request: Request) -> tuple[str | None, str]:
    return request.client, request.flow
