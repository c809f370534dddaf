"""Rows whose last tokens the host must know, and their neighbours."""

from typing import Any

from serving.core import Request, scheduler
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(82, "a row in lockstep takes part in a step while it waits for another one", "masks: lockstep")
def no_sitting_out(patch: Patch) -> None:
    patch.setattr(Request, "sits_out", False)


@mutation(
    83,
    "where there are drafts, all rows wait for one in lockstep",
    "masks: neighbours",
    seen_by="test_limits:test_a_row_in_lockstep_sits_out_while_others_go_on",
)
def neighbours_wait(patch: Patch) -> None:
    whole = scheduler.Scheduler.needs_settle_before_schedule

    def needs(self: Any) -> bool:
        drafting = self.config.num_speculative_tokens > 0
        held = any(request.lockstep and request.progress.unsettled for request in self.running)
        return whole(self) or (drafting and held)

    patch.setattr(scheduler.Scheduler, "needs_settle_before_schedule", needs)
