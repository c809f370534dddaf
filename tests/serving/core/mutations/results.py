"""What becomes of a step's tokens."""

from typing import Any

from serving.core import Status, scheduler
from serving.core.planning import settlement
from serving.core.requests.request import ResultDisposition
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(28, "a row whose request has ended is credited with its unsettled step", "A19 pitfall: late results")
def credit_the_dead(patch: Patch) -> None:
    whole = settlement._settle_dead

    def settle(host: Any, row: Any, tokens: Any, emitted: Any) -> None:
        if row.sample and row.fate is ResultDisposition.DROPPED and row.request.finished:
            accepted, _ = settlement.append(row.request, tokens)
            emitted.append(settlement.RowResult(row.request, row, accepted))
            return
        whole(host, row, tokens, emitted)

    patch.setattr(settlement, "_settle_dead", settle)


@mutation(39, "results of a step that was lost with the store are taken", "issue: failure")
def late_results(patch: Patch) -> None:
    whole = scheduler.Scheduler.settle

    def settle(self: Any, plan: Any, result: Any) -> Any:
        if plan not in self.unsettled:
            for row, tokens in zip(plan.rows, (*result.decode, *result.prefill), strict=True):
                if row.request.status is Status.WAITING:
                    settlement.append(row.request, tokens)
            return []
        return whole(self, plan, result)

    patch.setattr(scheduler.Scheduler, "settle", settle)


@mutation(44, "the unsettled tokens of a preempted request are counted twice", "A17")
def detached_tokens_twice(patch: Patch) -> None:
    whole = settlement._settle_dead

    def settle(host: Any, row: Any, tokens: Any, emitted: Any) -> None:
        if row.fate is ResultDisposition.DETACHED and row.request.status is Status.WAITING:
            whole(host, row, tokens, emitted)
            if not row.request.finished:
                whole(host, row, tokens, emitted)
            return
        whole(host, row, tokens, emitted)

    patch.setattr(settlement, "_settle_dead", settle)


@mutation(49, "min_tokens does not hold back a stop token", "issue: limits")
def stop_too_early(patch: Patch) -> None:
    whole = settlement.append

    def append(request: Any, tokens: Any) -> Any:
        request.min_tokens = 0
        minimum = whole(request, tokens)
        return minimum

    def wrap(request: Any, tokens: Any) -> Any:
        kept = request.min_tokens
        try:
            return append(request, tokens)
        finally:
            request.min_tokens = kept

    patch.setattr(settlement, "append", wrap)
