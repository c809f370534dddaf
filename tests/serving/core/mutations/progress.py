"""Who goes on, who waits and who makes room."""

from typing import Any

import pytest

from serving.core.cache.cache import Cache
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.planning import admission, rows
from serving.core.planning.plan import Budget
from serving.core.planning.state import SchedulerState
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(29, "chunks end on multiples of B even where B does not fit", "A25 B15")
def align_or_nothing(patch: Patch) -> None:
    whole = rows._chunk_end

    def chunk_end(host: Any, request: Any, start: int, room: Any) -> int:
        end = whole(host, request, start, room)
        if end < len(request.tokens) and end not in request.progress.stops and host.config.cache_mode == "align":
            return max(start, end - end % host.config.state_block_size)
        return end

    patch.setattr(rows, "_chunk_end", chunk_end)


@mutation(31, "the last in the order is never preempted: who has too little waits", "invariant 9")
def never_preempt(patch: Patch) -> None:
    patch.setattr(SchedulerState, "preempt_later", lambda self, request, plan: False)


@mutation(32, "the copy of a page is insisted on when no page is left", "invariant 9 and 11")
def insist_on_copy(patch: Patch) -> None:
    patch.setattr(RowPages, "_unshare", lambda self, pool: None)


@mutation(33, "keeping a boundary comes before going on", "invariant 11")
def boundaries_first(patch: Patch) -> None:
    choose, publish = RowSnapshots._choose, RowSnapshots.publish_boundary

    def choose_unkept(self: Any, count: int, after: Any) -> list[int]:
        kept = after.boundary if after is not None else ()
        stuck = all(slot in kept for slot in self._own) and not self._cache.slots.available
        return [] if stuck else choose(self, count, after)

    def publish_last_slot(self: Any, *boundary: Any, **later: Any) -> None:
        # Without looking whether the row keeps a slot to write.
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Cache, "can_spare_slot", lambda self, *, admitting=False: True)
            publish(self, *boundary, **later)

    patch.setattr(RowSnapshots, "_choose", choose_unkept)
    patch.setattr(RowSnapshots, "publish_boundary", publish_last_slot)


@mutation(
    51,
    "prefills get what decoding leaves, and no share",
    "A25 B15",
    "test_limits:test_a_prefill_gets_its_share_while_others_decode_the_budget_away",
)
def no_share(patch: Patch) -> None:
    patch.setattr(Budget, "grant_share", lambda self: None)


@mutation(
    54,
    "a checkpoint's slots are taken although a request waits for a row id",
    "invariant 11",
    "test_eviction:test_checkpoints_never_block_admission",
)
def greedy_checkpoints(patch: Patch) -> None:
    patch.setattr(Cache, "can_spare_slot", lambda self, *, admitting=False: True)


@mutation(
    56,
    "forks do not wait for the first sibling",
    "issue: forks",
    "test_forks:test_siblings_wait_for_the_first_ones_prompt_end",
)
def forks_do_not_wait(patch: Patch) -> None:
    patch.setattr(admission, "_waits_for_sibling", lambda host, request: False)


@mutation(
    59,
    "the first in the order makes room for the last",
    "invariant 9",
    "test_limits:test_the_latest_makes_room_and_resumes_from_the_cache",
)
def wrong_victim(patch: Patch) -> None:
    def preempt_first(self: Any, request: Any, plan: Any) -> bool:
        victims = [other for other in self.queues.running if other is not request]
        if victims:
            self.preempt(victims[0], plan)
        return bool(victims)

    patch.setattr(SchedulerState, "preempt_later", preempt_first)
