"""The rows of a step: decoding rows come first, then prompts that are being prefilled, then the queue."""

from collections.abc import Sequence

from serving.core.planning.admission import admit, admit_short, displace
from serving.core.planning.decode import plan_decode
from serving.core.planning.host_state import HostState
from serving.core.planning.plan import Budget, StepPlan
from serving.core.planning.prefill import plan_prefill
from serving.core.requests.request import Request, Status


def plan_rows(host: HostState, plan: StepPlan) -> None:
    """Add rows to an empty plan, within the budgets of one step."""
    budget = Budget(host.config)
    running = host.queues.running.copy()
    decoding = [request for request in running if request.progress.num_sampling_steps and not request.sits_out]
    if decoding and host.config.num_speculative_tokens:
        host.drafts.begin(decoding)
    spare = budget.tokens - len(decoding)
    for request in decoding:
        if request.status is Status.RUNNING:
            spare -= max(0, plan_decode(host, request, plan, budget, max(0, spare)))
    if not host.queues.waiting and all(request.progress.num_sampling_steps for request in running):
        return
    budget.tokens = min(budget.tokens, host.fairness.prompt_tokens(decoding=bool(plan.decode)))
    budget.grant_share()
    if host.queues.waiting and not host.queues.free_row_ids:
        displace(host, plan)
    prompts = [
        request
        for request in running
        if not request.progress.num_sampling_steps and not request.transfer.load and not request.blocked
    ]
    long = [request for request in prompts if host.fairness.is_long(request)]
    if long and budget.tokens > 1:  # a single token cannot be shared, and goes to the first in order
        with budget.half():
            _continue(host, [request for request in prompts if request not in long], plan, budget)
            if host.queues.waiting:
                admit_short(host, plan, budget)
        prompts = long
    _continue(host, prompts, plan, budget)
    if host.queues.waiting:
        admit(host, plan, budget)


def _continue(host: HostState, prompts: Sequence[Request], plan: StepPlan, budget: Budget) -> None:
    """Plans the next chunks of running requests in prefill, within the remaining tokens of the step."""
    for request in prompts:
        if request.status is not Status.RUNNING:  # preempted for one before it
            continue
        progress = request.progress
        if plan_prefill(host, request, plan, budget, preempting=True) and progress.set_up_due:
            progress.set_up_due = False
            plan.admitted.append(request)
