"""The scheduler's records: how a running request gives up its slots and pages, and states from and for other workers.

Decode side. A request whose prompt another worker has computed takes a row id, a slot and pages like any other request,
and then waits; its `load` describes the state to fetch. It counts as running for row ids, pools and preemption, but no
step has a row of it. The state is published, and the request planned, only after `arrived`. After a failure (`lost`,
preemption, a lost store) it is an ordinary request again, which computes its prompt here. States from this worker's own
tiers (`serving.core.tiers`) take the same path.

Prefill side. `hold` keeps the slot and the pages of a prompt's end until `release_hold`, even if the request ends.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.cache.cache import Cache
from serving.core.cache.pools import Pool
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import CheckpointKind, Match
from serving.core.cache.retention import Clock
from serving.core.config import SchedulerConfig
from serving.core.errors import WaitReason
from serving.core.planning.fairness import Fairness
from serving.core.planning.plan import StepPlan
from serving.core.requests.drafts import DraftPolicy
from serving.core.requests.queues import Queues
from serving.core.requests.request import (
    PlannedRow,
    Progress,
    RemoteLoad,
    RemoteState,
    Request,
    ResultDisposition,
    Status,
)
from serving.core.stats import Stats
from serving.core.tiers.journal import Journal
from serving.core.tiers.tiers import FetchCosts, Tiers


@dataclass(slots=True, eq=False)
class StateLease:
    """A slot and pages that do not change until they are released or the store is lost."""

    slot: int
    pages: list[int]
    position: int
    slots_of: Pool


class SchedulerState:
    """The base of the scheduler: what all parts of planning read and change.

    Args:
        drafts: decides how many drafts a row gets.
        clock: returns seconds, for the times of marks.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        drafts: DraftPolicy | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.config = config
        self.drafts = drafts if drafts is not None else DraftPolicy(config.num_speculative_tokens)
        self.tiers: Tiers | None = None
        self.journal: Journal | None = None
        self.fetch_costs = FetchCosts()
        """Estimated times of computing and fetching: those of the tiers, if there are any."""
        self.counters = Stats()
        self.num_arrivals = self.num_steps = 0
        self.queues = Queues(config.num_rows)
        self.fairness = Fairness(config)
        self.cache = Cache(config, self.counters, self.queues.could_be_admitted, clock)
        self.pending: StepPlan | None = None
        """The step that is planned, or being planned, and not yet dispatched."""
        self.admits_until: int | None = None
        """Requests with a later arrival number are not admitted for now; None: all may be."""
        self.wait_reasons: dict[Request, WaitReason] = {}
        """Of the requests that the last step's admission looked at and did not admit."""
        self.unsettled: deque[StepPlan] = deque()
        """Dispatched steps whose results have not been read, oldest first."""
        self.loads: list[RemoteLoad] = []
        """Loads started since the engine last took this list. Some may be obsolete (`RemoteLoad.valid`)."""
        self.unneeded_remotes: list[RemoteState] = []
        """Remote states that requests stopped needing since the engine last took this list."""

    @property
    def index(self) -> PrefixIndex | None:
        """The prefix index. None without a cache; replaced by `reset`."""
        return self.cache.index

    def holds_back(self, request: Request) -> bool:
        """Returns whether a request arrived after those that may be admitted now."""
        return self.admits_until is not None and request.arrival > self.admits_until

    def reach(self, request: Request, end: int) -> int:
        """Returns the number of tokens that need a page for a step that feeds tokens up to `end`.

        The last token of a sequence of maximum length is never fed, so it needs no page.
        """
        return min(end + self.config.num_lookahead_tokens, request.max_total - 1)

    def return_surplus(self, request: Request) -> None:
        """Releases the pages that the unsettled steps cannot reach."""
        progress = request.progress
        end = progress.num_computed
        for row in progress.unsettled:
            end += row.num_tokens
        progress.pages.return_surplus(self.reach(request, end))

    def undo(self, request: Request) -> None:
        """Removes the request's row from the pending step. The request stays running."""
        progress = request.progress
        row = progress.unsettled.pop()
        progress.num_sampling_steps -= row.sample
        progress.state.undo()
        progress.pages.undo()
        row.fate = ResultDisposition.DROPPED

    def release_all(self, request: Request, fate: ResultDisposition) -> None:
        """Releases slots, pages and the row of a request that runs or is about to run. Its unsettled rows get `fate`.

        These rows may still run on the device. This is safe: the slots and pages that they write are reused by steps
        that are planned, and therefore run, later.
        """
        progress = request.progress
        for row in progress.unsettled:
            row.fate = fate
        progress.state.release()
        progress.pages.release()
        if progress.row_id:
            self.queues.free_row_ids.append(progress.row_id)
        self.forget(request)

    def requeue(self, request: Request) -> None:
        """Puts a running request back into the queue, at its old place. Its state is computed again from its tokens."""
        self.queues.leave(request)
        self.release_all(request, ResultDisposition.DROPPED)
        self.queues.enqueue(request)

    def preempt(self, victim: Request, plan: StepPlan, *, behind: Request | None = None) -> None:
        """Returns a running request to the front of the queue, or behind another that waits. Its tokens stay.

        Its row in the step being planned is removed. Results of dispatched steps still count: those tokens were
        computed properly, though the state that goes with them is given away.
        """
        self.queues.leave(victim)
        unsettled = victim.progress.unsettled
        if unsettled and unsettled[-1].step == plan.step:
            row = unsettled.pop()
            row.fate = ResultDisposition.DROPPED
            plan.remove(row)
        self.release_all(victim, ResultDisposition.DETACHED)
        victim.queueing.num_preemptions += 1
        self.counters.preemptions += 1
        plan.preempted.append(victim)
        if behind is None:
            self.queues.enqueue(victim)
        else:
            self.queues.enqueue_behind(victim, behind)

    def preempt_later(self, request: Request, plan: StepPlan) -> bool:
        """Preempts the running request that is last in the order. Returns False if that is `request` itself.

        The first in the order can preempt all others, and a request that would not fit alone was refused on arrival. So
        at least one request always advances, and the others continue when those before them finish.
        """
        victim = self.queues.running[-1]
        if victim is request:
            return False
        self.preempt(victim, plan)
        return True

    def prepare_pages(self, request: Request, end: int, plan: StepPlan, *, preempting: bool) -> bool:
        """Reserves the pages that a step which feeds tokens up to `end` writes. Returns False if there are too few.

        Then no copy is left behind; pages that were taken on the way stay with the request.
        """
        pages = request.progress.pages
        tokens = self.reach(request, end)
        while not pages.reserve(tokens):
            if not (preempting and self.preempt_later(request, plan)):
                pages.undo()
                return False
        return True

    def forget(self, request: Request) -> None:
        """Resets a request to its state before it ran. Its tokens stay."""
        request.progress = Progress.begin(request, self.cache)
        request.queueing.retry_above, request.queueing.retry_at = -1, 0
        if request.transfer.load is not None:
            self.drop_remote(request)

    def drop_remote(self, request: Request) -> None:
        """Records that a request no longer needs its remote state, so that the worker with the state can release it."""
        transfer = request.transfer
        if transfer.remote is not None and transfer.remote.held is None:  # a tier holds nothing for single requests
            self.unneeded_remotes.append(transfer.remote)
        transfer.remote = transfer.load = None

    # -- states from and for other workers --

    def pop_unneeded_remotes(self) -> list[RemoteState]:
        """Returns the remote states that requests have stopped needing since the last call."""
        unneeded, self.unneeded_remotes = self.unneeded_remotes, []
        return unneeded

    def arrived(self, load: RemoteLoad) -> None:
        """Called when the program that writes a load into its slot and pages has been dispatched.

        The next step continues from the loaded state. Full pages are published now. The state is also published, if it
        should be kept and the row can have another slot to write.
        """
        assert load.valid, "the request no longer waits for this"
        request, position = load.request, load.position
        progress, index = request.progress, self.index
        request.transfer.load = request.transfer.remote = None
        progress.set_up_due = True
        progress.num_computed = position
        if not request.lookup.final:
            request.lookup.num_cached_tokens = load.remote.cached_tokens
            request.lookup.written_elsewhere = load.remote.written_tokens
            request.lookup.miss_reason = None
        progress.stops = self.cache.policy.stops(request.prompt_len, position, position, request.marks)
        if index is not None and progress.pages.publishes_at(position):
            index.publish_pages(progress.content, position)
        kind = None
        if load.remote.held is not None:
            kind = load.remote.held.unit.kind
        elif position == request.prompt_len:
            kind = CheckpointKind.PROMPT_END
        elif position % self.config.state_block_size == 0:
            kind = CheckpointKind.BOUNDARY
        progress.state.arrived(load.slot, progress.content, position, kind)
        if index is not None and request.marks:
            index.keep(request.marks, request.client, index.state_at(progress.content, position))

    def lost(self, load: RemoteLoad) -> None:
        """Returns a request whose load failed to its old place in the queue. It computes its prompt here."""
        if load.valid:
            self.requeue(load.request)

    def hold(self, row: PlannedRow) -> StateLease:
        """Publishes the state S(n) from which a dispatched row continues, and the pages of its n tokens."""
        request, cache = row.request, self.cache
        assert request.status is Status.RUNNING
        progress = request.progress
        slot = progress.state.hand_off(row.access)
        return StateLease(slot, progress.pages.hand_off(row.end), row.end, cache.slots)

    def hold_cached(self, tokens: Sequence[int], salt: str | None, adapter: str | None = None) -> StateLease | None:
        """Leases the deepest state of these tokens on the device, and the pages that it needs; None without one."""
        index, cache = self.index, self.cache
        match = index.find(tokens, cache.scope(salt, adapter)) if index is not None else None
        if index is None or match is None or match.entry is None:
            return None
        entry = match.entry
        pages = entry.pages if cache.pages else []
        cache.slots.retain(entry.slot)
        for page in pages:
            cache.pages.retain(page)
        index.touch(entry)
        return StateLease(entry.slot, pages, entry.position, cache.slots)

    def hold_is_valid(self, held: StateLease) -> bool:
        """Returns whether the store of the hold still exists."""
        return held.slots_of is self.cache.slots

    def release_hold(self, held: StateLease) -> None:
        """Releases it, once."""
        if self.hold_is_valid(held):
            self.cache.slots.release(held.slot)
            for page in reversed(held.pages):
                self.cache.pages.release(page)

    def check(self, *, idle: bool = False) -> None:
        """Raises `AssertionError` unless every slot, page and row id has exactly one owner; with `idle`, none may be in
        use."""
        for pool in self.cache.pools:
            pool.check(idle=idle)
        if self.index is not None:
            self.index.check()
        if self.tiers is not None:
            self.tiers.check()
        self.queues.check()


def remote_is_unneeded(request: Request, match: Match | None) -> bool:
    """Returns whether the cache already has everything that the other worker could send."""
    remote = request.transfer.remote
    return remote is not None and match is not None and match.position >= remote.position


def reserve(scheduler: SchedulerState, request: Request, match: Match | None) -> WaitReason | None:
    """Admits a request, which then waits for its state. Without room, it keeps nothing and returns the reason.

    All matching pages are referenced, even beyond the deepest cached state, because a page depends only on its tokens.
    The page of the next token is also reserved, so that the first step after the arrival needs no page.
    """
    remote, progress, config = request.transfer.remote, request.progress, scheduler.config
    pages, pool = progress.pages, scheduler.cache.pages
    assert remote is not None
    if pool:
        pages.resume_from(match.path[: remote.position // config.page_size] if match is not None else [])
        reach = scheduler.reach(request, max(len(request.tokens), remote.position + 1))
        running = len(scheduler.queues.running)
        if (running and pages.missing(reach) + running > pool.available) or not pages.reserve(reach):
            scheduler.release_all(request, ResultDisposition.DROPPED)
            request.queueing.retry_above = pool.available
            return WaitReason.MEMORY
    slot = progress.state.lease()
    if not slot:
        scheduler.release_all(request, ResultDisposition.DROPPED)
        return WaitReason.SLOTS
    progress.row_id = scheduler.queues.free_row_ids.pop()
    first, end = pages.num_published, pages.pages_for(remote.position)
    load = RemoteLoad(request, remote, first * config.page_size, slot, pages.table[first:end])
    request.transfer.load = load
    scheduler.queues.admitted(request)
    scheduler.loads.append(load)
    return None
