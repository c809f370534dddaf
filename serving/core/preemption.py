"""Making room for those who came first, by throwing away what can be computed again."""

from serving.core.host_state import HostState
from serving.core.plan import DecodeRow, Fate, StepPlan
from serving.core.request import Request


def preempt(host: HostState, victim: Request, plan: StepPlan) -> None:
    """Back to the queue, at its old place; slots and pages go, tokens stay.

    If it has a row in the step being planned, that is taken out. What a dispatched step still brings counts: those
    tokens were computed properly, though the state that goes with them is given away.
    """
    host.leave(victim)
    if victim.flights and victim.flights[-1].step == plan.step:
        row = victim.flights.pop()
        host.forsake(row)
        row.fate = Fate.DROPPED
        if isinstance(row, DecodeRow):
            plan.decode.remove(row)
        else:
            plan.prefill.remove(row)
        if row in plan.effects:
            plan.effects.remove(row)
    host.release_all(victim, Fate.DETACHED)
    victim.num_preemptions += 1
    host.stats.preemptions += 1
    plan.preempted.append(victim)
    host.enqueue(victim)
