"""What is given back, and what is given up first."""

from typing import Any

from serving.core.cache import retention
from serving.core.cache.cache import Cache
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_state import RowState
from serving.core.planning.state import SchedulerState
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(27, "the surplus of optimistic pages is kept", "issue: accounts")
def surplus_kept(patch: Patch) -> None:
    patch.setattr(RowPages, "return_surplus", lambda self, tokens: None)


@mutation(35, "an abort between planning and dispatch leaks what the row held in addition to its request", "A52 B12")
def leak_on_abort(patch: Patch) -> None:
    state, row_pages = RowState.release, RowPages.release

    def release_slots(self: Any) -> None:
        self._publications, self.leaving = (), 0
        state(self)

    def release_pages(self: Any) -> None:
        self.copy = None
        row_pages(self)

    patch.setattr(RowState, "release", release_slots)
    patch.setattr(RowPages, "release", release_pages)


@mutation(36, "preemption forgets the checkpoint that the row was reading", "A17 issue: accounts")
def leak_on_preemption(patch: Patch) -> None:
    whole = SchedulerState.preempt

    def preempt(self: Any, victim: Any, plan: Any, **more: Any) -> None:
        victim.progress.state._read_only = 0
        whole(self, victim, plan, **more)

    patch.setattr(SchedulerState, "preempt", preempt)


@mutation(37, "withdrawing a step keeps the slots that it took for publication", "B12")
def leak_on_withdraw(patch: Patch) -> None:
    whole = RowState.undo

    def undo(self: Any) -> None:
        self._publications = ()
        whole(self)

    patch.setattr(RowState, "undo", undo)


@mutation(38, "the cache is kept when the store is lost", "issue: failure")
def cache_survives_loss(patch: Patch) -> None:
    whole = Cache.clear

    def clear(self: Any) -> None:
        if not hasattr(self, "slots"):
            whole(self)
            return
        for pool in self.pools:
            for i in range(1, pool.size):
                while pool.refs[i]:
                    pool.release(i)

    patch.setattr(Cache, "clear", clear)


@mutation(
    52,
    "states are evicted least recently used first, whatever they are worth",
    "issue: worth",
    "test_eviction:test_interior_states_go_before_the_end_of_an_older_chain",
)
def plain_lru(patch: Patch) -> None:
    patch.setattr(retention.RetentionPolicy, "rank", lambda self, entry: 1)


@mutation(53, "a branch counts as interior", "invariant 11", "test_eviction:test_a_branch_is_not_interior")
def branch_is_interior(patch: Patch) -> None:
    patch.setattr(retention.RetentionPolicy, "rank", lambda self, entry: int(not entry.below))


@mutation(
    55,
    "a state of little worth displaces one of more",
    "issue: worth",
    "test_eviction:test_a_modest_state_displaces_nothing_of_worth",
)
def immodest(patch: Patch) -> None:
    patch.setattr(retention.RetentionPolicy, "is_low_value", lambda self, prompt_len, position, kind: False)
