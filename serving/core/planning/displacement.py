"""Makes room for a request without a row where another client, or another request, has several rows."""

import itertools
from collections import Counter

from serving.core.planning.admission import reason_to_pass_over
from serving.core.planning.fairness import MOST_OVERTAKEN
from serving.core.planning.plan import StepPlan
from serving.core.planning.state import SchedulerState
from serving.core.reasons import WaitReason
from serving.core.requests.request import Request

DISPLACE_AFTER = 16
"""Steps that a request waits for a row, first in turn, before a choice of its client's other requests makes room."""
MOST_DISPLACEMENTS = 4
"""Maximum number of times that one choice is displaced for its own client; for others, rows with fewer go first."""


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
        if queues.free_row_ids and not (of_client and _lacks_memory(scheduler, request)):
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


def _lacks_memory(scheduler: SchedulerState, request: Request) -> bool:
    """Returns whether a short prompt found too few slots or pages in this step."""
    reason = scheduler.wait_reasons.get(request)
    return reason in (WaitReason.MEMORY, WaitReason.SLOTS) and not scheduler.fairness.is_long(request)


def _gives_way(
    running: Request, waiting: Request, clients: Counter[str | None], flows: Counter[tuple[str | None, str]]
) -> bool:
    """Returns whether a row of one request may be taken for another; `clients` and `flows` count their rows."""
    if running.priority < waiting.priority:
        return False
    if running.client != waiting.client:
        return clients[running.client] >= clients[waiting.client] + 2
    return _may_give_way(running) and flows[_flow(running)] >= flows[_flow(waiting)] + 2


def _may_give_way(running: Request) -> bool:
    return running.queueing.num_displacements < MOST_DISPLACEMENTS


def _flow(request: Request) -> tuple[str | None, str]:
    """Fields that all choices of a call share."""
    return request.client, request.flow
