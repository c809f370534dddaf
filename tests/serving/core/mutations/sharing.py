"""What several rows may read, and none may write."""

from typing import Any

from serving.core import scheduler
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.cache.row_state import RowState
from serving.core.planning import settlement
from serving.core.planning.state import SchedulerState
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(9, "a row writes the checkpoint that it reads", "A32 B10 B23")
def write_shared_slot(patch: Patch) -> None:
    whole = RowSnapshots._choose

    def choose(self: Any, count: int, after: Any) -> list[int]:
        checkpoint = self._read_only
        return [checkpoint, *whole(self, count, after)][:count] if checkpoint else whole(self, count, after)

    patch.setattr(RowSnapshots, "_choose", choose)


@mutation(10, "a partly filled page that was hit is written without a copy", "A32 B10")
def no_copy_after_hit(patch: Patch) -> None:
    whole = RowPages.resume_from

    def resume(self: Any, path: Any, entry: Any = None) -> None:
        whole(self, path, entry)
        self.shared = -1

    patch.setattr(RowPages, "resume_from", resume)


@mutation(11, "a row writes on in the page in which it published its own prompt end", "A32 B10")
def no_copy_after_own_end(patch: Patch) -> None:
    whole = settlement.after_dispatch

    def after(host: Any, row: Any) -> None:
        whole(host, row)
        row.request.progress.pages.shared = -1

    patch.setattr(scheduler, "after_dispatch", after)


@mutation(12, "what a row of the step reads may be given to another row of the same step", "A20 B17")
def release_when_planned(patch: Patch) -> None:
    whole = RowState.reserve_chunk

    def reserve(self: Any, *chunk: Any, **more: Any) -> Any:
        access = whole(self, *chunk, **more)
        if access is not None and self.leaving:
            self._cache.slots.release(self.leaving)
            self.leaving = 0
        return access

    patch.setattr(RowState, "reserve_chunk", reserve)


@mutation(13, "the source of a page copy is let go before the copy is dispatched", "B10")
def release_source_early(patch: Patch) -> None:
    reserve, release = RowPages.reserve, RowPages.release

    def reserve_early(self: Any, tokens: int) -> bool:
        done, pool = reserve(self, tokens), self._pool
        if done and self.copy is not None:
            source = self.copy[0]
            pool.release(source)
            if not pool.refs[source]:
                pool.withdraw(source)
        return done

    def dispatched(self: Any) -> bool:
        copied, self.copy = self.copy is not None, None
        return copied

    def release_all_but_source(self: Any) -> None:
        self.copy = None
        release(self)

    patch.setattr(RowPages, "reserve", reserve_early)
    patch.setattr(RowPages, "dispatched", dispatched)
    patch.setattr(RowPages, "release", release_all_but_source)
    # Withdrawing is not what this is about.
    patch.setattr(scheduler.Scheduler, "withdraw", lambda self, plan: self.reset())


@mutation(14, "an equal page is taken over without being referenced", "A32")
def adopt_without_reference(patch: Patch) -> None:
    whole = RowPages.exchange

    def exchange(self: Any, at: int, page: int) -> None:
        whole(self, at, page)
        if self._pool.refs[page] > 1:
            self._pool.refs[page] -= 1

    patch.setattr(RowPages, "exchange", exchange)


@mutation(40, "a state that a row reads may be evicted", "invariant 2")
def evict_in_use(patch: Patch) -> None:
    def evict(self: Any, max_rank: int | None) -> bool:
        for root in self.roots.values():
            stack = [root]
            while stack:
                node = stack.pop()
                for entry in list(node.states.values()):
                    if self.slots.refs[entry.slot]:
                        self.slots.refs[entry.slot] = 0
                        self.slots.num_cached += 1
                    self.drop_state(entry)
                    return True
                stack += node.children.values()
        return False

    patch.setattr(PrefixIndex, "_evict_state", evict)


@mutation(41, "a page with others below it may be evicted", "invariant 11")
def evict_inner_page(patch: Patch) -> None:
    whole = PrefixIndex.evict_page

    def evict(self: Any) -> bool:
        for root in self.roots.values():
            for node in root.children.values():
                if not self.pages.refs[node.page]:
                    self._drop_node(node)
                    return True
        return whole(self)

    patch.setattr(PrefixIndex, "evict_page", evict)


@mutation(46, "drafts are proposed into a shared page: a whole-prompt hit copies nothing before it samples", "A32 B10")
def proposals_into_shared_page(patch: Patch) -> None:
    whole = SchedulerState.prepare_pages

    def prepare(self: Any, request: Any, end: int, plan: Any, *, preempting: bool) -> bool:
        if end == request.progress.num_computed and not request.progress.unsettled:
            return True
        return whole(self, request, end, plan, preempting=preempting)

    patch.setattr(SchedulerState, "prepare_pages", prepare)


@mutation(63, "equal pages of twins are held twice", "issue: accounts", "test_hits:test_twins_hold_their_prompt_once")
def held_twice(patch: Patch) -> None:
    whole = RowPages.exchange

    def exchange(self: Any, at: int, page: int) -> None:
        whole(self, at, page)
        # The page of its own that the row should have given up.
        self._pool.take()

    patch.setattr(RowPages, "exchange", exchange)
