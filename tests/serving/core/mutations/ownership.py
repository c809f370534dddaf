"""What several rows may read and none may write, what is given back, and what is given up first."""

from serving.core import scheduler
from serving.core.cache.cache import Cache
from serving.core.cache.pools import Pool
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.retention import RetentionPolicy
from serving.core.cache.row_forms import RowSnapshots
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_state import RowState
from serving.core.planning.state import SchedulerState
from tests.serving.core.mutations.registry import Patch, mutation

# -- read by several --


@mutation(9, RowSnapshots, "_choose")
def write_shared_slot(whole, self, count, after):
    checkpoint = self._read_only
    return [checkpoint, *whole(self, count, after)][:count] if checkpoint else whole(self, count, after)


@mutation(10, RowPages, "resume_from")
def no_copy_after_hit(whole, self, path, entry=None):
    whole(self, path, entry)
    self.shared = -1


@mutation(11, scheduler, "after_dispatch")
def no_copy_after_own_end(whole, host, row):
    whole(host, row)
    row.request.progress.pages.shared = -1


@mutation(12, RowState, "reserve_chunk")
def release_when_planned(whole, self, *chunk, **more):
    access = whole(self, *chunk, **more)
    if access is not None and self.leaving:
        self._cache.slots.release(self.leaving)
        self.leaving = 0
    return access


@mutation(13)
def release_source_early(patch: Patch) -> None:
    reserve, release = RowPages.reserve, RowPages.release

    def reserve_early(self, tokens):
        done, pool = reserve(self, tokens), self._pool
        if done and self.copy is not None:
            source = self.copy[0]
            pool.release(source)
            if not pool.refs[source]:
                pool.withdraw(source)
        return done

    def dispatched(self):
        copied, self.copy = self.copy is not None, None
        return copied

    def release_all_but_source(self):
        self.copy = None
        release(self)

    patch.setattr(RowPages, "reserve", reserve_early)
    patch.setattr(RowPages, "dispatched", dispatched)
    patch.setattr(RowPages, "release", release_all_but_source)
    # Withdrawing is not what this is about.
    patch.setattr(scheduler.Scheduler, "withdraw", lambda self, plan: self.reset())


@mutation(14, RowPages, "exchange")
def adopt_without_reference(whole, self, at, page):
    whole(self, at, page)
    if self._pool.refs[page] > 1:
        self._pool.refs[page] -= 1


@mutation(40, PrefixIndex, "evict_state")
def evict_in_use(whole, self, max_rank=None):
    for entry in filter(None, self.slots.owners):
        if self.slots.refs[entry.slot]:
            self.slots.refs[entry.slot] = 0
            self.slots.cached_of[0] += 1
        self.drop_state(entry)
        return True
    return False


@mutation(41, PrefixIndex, "evict_page")
def evict_inner_page(whole, self):
    for root in self.roots.values():
        for node in root.children.values():
            if not self.pages.refs[node.page]:
                self._drop_node(node)
                return True
    return whole(self)


@mutation(46, SchedulerState, "prepare_pages")
def proposals_into_shared_page(whole, self, request, end, plan, *, preempting):
    if end == request.progress.num_computed and not request.progress.unsettled:
        return True
    return whole(self, request, end, plan, preempting=preempting)


@mutation(63, RowPages, "exchange")
def held_twice(whole, self, at, page):
    whole(self, at, page)
    # The page of its own that the row should have given up.
    self._pool.take()


# -- accounts --


@mutation(35)
def leak_on_abort(patch: Patch) -> None:
    state, row_pages = RowState.release, RowPages.release

    def release_slots(self):
        self._publications, self.leaving = (), 0
        state(self)

    def release_pages(self):
        self.copy = None
        row_pages(self)

    patch.setattr(RowState, "release", release_slots)
    patch.setattr(RowPages, "release", release_pages)


@mutation(36, SchedulerState, "preempt")
def leak_on_preemption(whole, self, victim, plan, **more):
    victim.progress.state._read_only = 0
    whole(self, victim, plan, **more)


@mutation(37, RowState, "undo")
def leak_on_withdraw(whole, self):
    self._publications = ()
    whole(self)


@mutation(38, Cache, "clear")
def cache_survives_loss(whole, self):
    if not hasattr(self, "slots"):
        whole(self)
        return
    for pool in self.pools:
        for i in range(1, pool.size):
            while pool.refs[i]:
                pool.release(i)


@mutation(42, Pool, "__init__")
def null_handed_out(whole, self, *sizes):
    whole(self, *sizes)
    self.free_of[0].insert(0, 0)


@mutation(47, Pool, "take")
def one_slot_for_all(whole, self, *member, **value):
    fresh = whole(self, *member, **value)
    if fresh and self.name == "slots" and self.size > 6:
        used = [i for i in range(1, self.size) if self.refs[i] == 1 and self.owners[i] is None and i != fresh]
        if len(used) > 3:
            self.release(fresh)
            self.refs[used[0]] += 1
            return used[0]
    return fresh


# -- one expression in the place of a function --

mutation(27, RowPages, "return_surplus")(lambda whole, self, tokens: None)
mutation(52, RetentionPolicy, "rank")(lambda whole, self, entry: 1)
mutation(53, RetentionPolicy, "rank")(lambda whole, self, entry: int(not entry.below))
mutation(54, Cache, "can_spare_slot")(lambda whole, self, *, admitting=False: True)
mutation(93, Pool, "member_of")(lambda whole, self, index: 0)
mutation(55, RetentionPolicy, "is_low_value")(lambda whole, self, prompt_len, position, kind: False)
