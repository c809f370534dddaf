"""Makes room for a request without a row where another client, or another request, has several rows."""

import itertools
from collections import Counter

from serving.core.planning.admission import reason_to_pass_over
from serving.core.planning.fairness import MOST_OVERTAKEN
from serving.core.planning.plan import StepPlan
from serving.core.planning.state import SchedulerState
from serving.core.requests.request import Request

DISPLACE_AFTER = 16
"""Steps that a request waits for a row, first in turn, before a choice of another request makes room for it."""
MOST_DISPLACEMENTS = 4
"""Maximum number of times that one choice is displaced."""


def displace(scheduler: SchedulerState, plan: StepPlan) -> None:
    """If all rows are taken, makes room for a request that has waited for a while and has far fewer rows than another.

    A client with at least two rows more than the request's own has to give one up; or, of the same client, a request
    with at least two choices running more than this one. Each choice is displaced a few times at most.
    """
    queues = scheduler.queues
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
        if reason_to_pass_over(scheduler, request) is not None:
            continue
        if request.queueing.waits_since is None:
            request.queueing.waits_since = plan.step
        if plan.step - request.queueing.waits_since < DISPLACE_AFTER:
            continue
        candidates = [each for each in queues.running if _gives_way(each, request, clients, flows)]
        if not candidates:
            continue
        victim = max(candidates, key=lambda each: (clients[each.client], flows[_flow(each)], each.order))
        scheduler.preempt(victim, plan, behind=request)
        victim.queueing.num_displacements += 1
        scheduler.counters.displacements += 1
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
