"""The pages of a row's next step, at the cost of later requests if need be."""

from serving.core.planning.host_state import HostState
from serving.core.planning.plan import StepPlan
from serving.core.planning.preemption import preempt_later
from serving.core.requests.request import Request


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
