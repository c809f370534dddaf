"""Preempts later requests if an earlier one needs their slots and pages. Their lost states are computed again."""

from serving.core.planning.host_state import HostState
from serving.core.planning.plan import StepPlan
from serving.core.requests.request import Request, ResultDisposition


def preempt(host: HostState, victim: Request, plan: StepPlan, *, behind: Request | None = None) -> None:
    """Back to the front of the queue, or behind another that waits; slots and pages go, tokens stay.

    If it has a row in the step being planned, that is taken out. What a dispatched step still brings counts: those
    tokens were computed properly, though the state that goes with them is given away.
    """
    host.queues.leave(victim)
    unsettled = victim.progress.unsettled
    if unsettled and unsettled[-1].step == plan.step:
        row = unsettled.pop()
        row.fate = ResultDisposition.DROPPED
        plan.remove(row)
    host.release_all(victim, ResultDisposition.DETACHED)
    victim.queueing.num_preemptions += 1
    host.stats.preemptions += 1
    plan.preempted.append(victim)
    if behind is None:
        host.queues.enqueue(victim)
    else:
        host.queues.enqueue_behind(victim, behind)


def preempt_later(host: HostState, request: Request, plan: StepPlan) -> bool:
    """Preempt the running request that is last in the order; False if that is `request` itself.

    The first in the order can preempt all others, and a request that would not fit alone was refused on arrival. So at
    least one request always advances, and the others continue when those before them finish.
    """
    victim = host.queues.running[-1]
    if victim is request:
        return False
    preempt(host, victim, plan)
    return True


def prepare_pages(host: HostState, request: Request, end: int, plan: StepPlan, *, preempting: bool) -> bool:
    """See that a step which feeds tokens up to `end` can write their pages; False if there are too few.

    Then no copy is left behind; pages that were taken on the way stay with the request.
    """
    pages = request.progress.pages
    tokens = host.reach(request, end)
    while not pages.reserve(tokens):
        if not (preempting and preempt_later(host, request, plan)):
            pages.undo()
            return False
    return True
