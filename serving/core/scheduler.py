"""The host's side of continuous batching: chooses the rows of the next step, and applies the result of the last one.

    plan = scheduler.schedule()          # may be called while one earlier plan is unsettled
    ... dispatch it ...
    scheduler.dispatched(plan)           # or withdraw(plan), if it could not be dispatched
    scheduler.settle(earlier, result)    # in the order of dispatch

`planning.rows` chooses the rows of a step, and `planning.fairness` the prompts that may overtake others in the queue.
`planning.host_state` has the scheduler's records, `planning.publication` publishes states and pages, and
`cache.row_state` records the row that owns a slot.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from serving.core.cache.pools import Pool
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import Scope
from serving.core.cache.retention import RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.planning.admission import refuse_impossible, why_wait
from serving.core.planning.host_state import HostState
from serving.core.planning.plan import RowResult, StepPlan, StepResult
from serving.core.planning.publication import after_dispatch
from serving.core.planning.remote import StateLease, arrived, hold, hold_cached, hold_is_valid, lost, release_hold
from serving.core.planning.rows import plan_rows
from serving.core.planning.settlement import finish, settle
from serving.core.reasons import FinishReason, RequestError, WaitReason
from serving.core.requests.drafts import DraftPolicy
from serving.core.requests.request import PlannedRow, RemoteLoad, RemoteState, Request, ResultDisposition, Status
from serving.core.tiers.content import Chain
from serving.core.tiers.journal import Journal
from serving.core.tiers.prices import Prices
from serving.core.tiers.publishing import Publishing
from serving.core.tiers.tiers import Tiers


class Scheduler:
    """Plans steps and settles them. Not thread-safe."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        policy: RetentionPolicy | None = None,
        drafts: DraftPolicy | None = None,
    ) -> None:
        self.config = config
        drafts = drafts if drafts is not None else DraftPolicy(config.num_speculative_tokens)
        self._host = HostState(config, policy if policy is not None else RetentionPolicy(config), drafts)
        self._arrivals = 0
        self._steps = 0

    # -- requests --

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` if it can never run or the queue is full."""
        try:
            refuse_impossible(self._host, request)
        except RequestError:
            self._host.stats.refused += 1
            raise
        self._arrivals += 1
        request.arrival = self._arrivals
        self._host.queues.unfinished[request.request_id] = request
        self._host.forget(request)
        self._host.stats.requests += 1
        self._host.queues.start(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any time. Returns None if there is no such unfinished request."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request for a reason that the scheduler does not detect (a stop text, an error)."""
        request = self._host.queues.unfinished.get(request_id)
        if request is not None:
            finish(self._host, request, reason)
        return request

    def discard(self, request_id: str) -> Request | None:
        """Ends a request whose states may be wrong, and removes all cached states of its tokens."""
        request = self.finish(request_id, FinishReason.ERROR)
        if request is not None and self.index is not None:
            scope = self._host.cache.scope(request.cache_salt, request.adapter)
            self.index.forget(request.tokens, scope)
            if self.tiers is not None:
                self.tiers.forget(request.tokens, scope)
        return request

    def hold_new(self) -> None:
        """Holds back the requests that are added from now on, until `release_new`."""
        self._host.admits_until = self._arrivals

    def release_new(self) -> None:
        """Ends `hold_new`: all requests may be admitted."""
        self._host.admits_until = None

    @property
    def has_unheld(self) -> bool:
        """Whether there is work other than the requests that `hold_new` holds back."""
        return any(not self._host.holds_back(request) for request in self._host.queues.unfinished.values())

    def resumable(self, tokens: Sequence[int], salt: str | None, adapter: str | None = None) -> int:
        """Returns the number of tokens of a prompt that are cached now.

        Any thread may call this while another one plans. It changes nothing, and the answer is a hint.
        """
        index = self.index
        return 0 if index is None else index.find(tokens, self._host.cache.scope(salt, adapter)).position

    def fetchable(
        self,
        tokens: Sequence[int],
        salt: str | None,
        beyond: int,
        chains: dict[Scope, Chain],
        adapter: str | None = None,
    ) -> int:
        """Returns the number of tokens of a prompt with a state in a tier below the device; `beyond` if none is longer.

        Any thread may call this, like `resumable`. `chains`: names of these tokens, kept for further calls.
        """
        tiers = self.tiers
        if tiers is None or self.index is None or beyond >= len(tokens):
            return beyond
        scope = self._host.cache.scope(salt, adapter)
        return tiers.reach(chains.setdefault(scope, Chain(scope, tiers.block)), tokens, beyond)

    @property
    def waiting(self) -> list[Request]:
        """The waiting requests in their order."""
        return self._host.queues.waiting

    def why_wait(self, requests: Iterable[Request]) -> list[WaitReason]:
        """Returns hints why requests of `waiting` have not been admitted. May be called from any thread."""
        return why_wait(self._host, requests)

    @property
    def running(self) -> list[Request]:
        """The requests with a row id in order of arrival."""
        return self._host.queues.running

    @property
    def has_unfinished(self) -> bool:
        """Whether there is unfinished work."""
        return bool(self._host.queues.unfinished)

    # -- steps --

    def needs_settle_before_schedule(self) -> bool:
        """Whether the unsettled step must settle before the next one can be planned.

        This is so without overlap, and if most rows could not take part in the next step, because the host must know
        their last tokens first. (If fewer rows need this, they skip the step, and the others continue.)
        """
        host = self._host
        if not host.unsettled:
            return False
        if not self.config.overlap:
            return True
        running = host.queues.running
        if not any(request.sits_out for request in running):
            return False
        return 2 * sum(request.lockstep for request in running) > len(running)

    def schedule(self) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to do before an unsettled step settles, or at all."""
        if self.needs_settle_before_schedule():
            return None
        host = self._host
        assert host.pending is None, "the last plan was neither dispatched nor withdrawn"
        assert len(host.unsettled) <= 1, "at most one step may be unsettled while another is planned"
        self._steps += 1
        plan = host.pending = StepPlan(self._steps)
        plan_rows(host, plan)
        if not plan.decode and not plan.prefill:
            host.pending = None
            return None
        return plan

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step on the device, from which later steps are sized to keep `max_decode_pause`."""
        num_tokens = sum(row.num_tokens for row in plan.prefill)
        if num_tokens:
            self._host.fairness.observe(num_tokens, seconds)
            self.prices.computed(num_tokens, seconds)

    def dispatched(self, plan: StepPlan) -> None:
        """Called when the step is dispatched: publishes the prompt states and pages that it computes."""
        host = self._host
        assert plan is host.pending, "only the latest plan can be dispatched, once"
        host.pending = None
        plan.dispatched = True
        for row in plan.effects:
            if row.fate is ResultDisposition.LIVE:
                after_dispatch(host, row)
        for request in plan.admitted:
            if not request.lookup.final and not request.finished:
                request.lookup.final = True
                lookup = request.lookup
                host.stats.count_admission(request.prompt_len, lookup.num_cached_tokens, lookup.miss_reason)
        host.stats.steps += 1
        host.unsettled.append(plan)

    def withdraw(self, plan: StepPlan) -> None:
        """Undoes a step that could not be dispatched. Nothing of it is published.

        Requests that it preempted stay in the queue, and entries that it evicted stay evicted.
        """
        host = self._host
        assert plan is host.pending, "only the latest plan can be withdrawn, before it is dispatched"
        host.pending = None
        host.stats.withdrawn += 1
        for row in plan.rows:
            if row.fate is ResultDisposition.LIVE:
                request = row.request
                host.undo(request)
                if request not in plan.admitted:
                    host.return_surplus(request)
                    request.progress.state.trim(request.progress.last_access)
        for request in plan.admitted:
            if request.status is Status.RUNNING:
                host.requeue(request)

    def settle(self, plan: StepPlan, result: StepResult) -> list[RowResult]:
        """Takes a step's result, in the order of dispatch. Returns the valid tokens by request.

        Results of a step that a `reset` wrote off are ignored.
        """
        host = self._host
        if not host.unsettled or plan is not host.unsettled[0]:
            assert all(row.fate is ResultDisposition.DROPPED for row in plan.rows), "steps settle in order"
            return []
        host.unsettled.popleft()
        return settle(host, plan, result)

    def reset(self) -> None:
        """Called when the store is lost: removes all checkpoints and pages, and queues all running requests again.

        Settled tokens are kept. Unsettled steps are ignored.
        """
        host = self._host
        plans = [*host.unsettled, *([host.pending] if host.pending is not None else [])]
        for plan in plans:
            for row in plan.rows:
                row.fate = ResultDisposition.DROPPED
        host.unsettled.clear()
        host.pending = None
        host.cache.clear()
        if host.tiers is not None:
            host.tiers.reset()
        stopped = host.queues.stop_all()
        for request in host.queues.unfinished.values():
            request.queueing.prompt_done = False
            host.forget(request)
        for request in stopped:
            host.queues.enqueue(request)
        host.stats.resets += 1

    def drop_cached(self) -> None:
        """Drops all cached prefixes, on the device and in the tiers. Running requests keep theirs."""
        if self._host.cache.index is not None:
            self._host.cache.index.drop_all()
        if self._host.tiers is not None:
            self._host.tiers.clear()

    def change_weights(self, lineage: int = 0) -> None:
        """Called after a weight update: cached prefixes are no longer found, and every unfinished request
        is computed again from its tokens. No step may be unsettled.

        `lineage`: identifies the weights among replicas (`Scope`).
        """
        host = self._host
        assert not host.unsettled, "a step under the old weights has not been settled"
        assert host.pending is None, "a step under the old weights has been planned"
        for request in host.queues.running.copy():
            host.requeue(request)
        host.cache.outdate(lineage)
        if host.tiers is not None:
            host.tiers.outdate()
        if host.journal is not None:
            host.journal.outdate()
        for request in host.queues.unfinished.values():
            request.queueing.prompt_done = False
            host.forget(request)
        host.stats.weight_changes += 1

    # -- states from and for other workers; see `remote` --

    def take_loads(self) -> list[RemoteLoad]:
        """Returns the loads that requests wait for since the last call. Some may be obsolete (`RemoteLoad.valid`)."""
        loads, self._host.loads = self._host.loads, []
        return loads

    def pop_unneeded_remotes(self) -> list[RemoteState]:
        """Returns the remote states that requests have stopped needing since the last call."""
        unneeded, self._host.unneeded_remotes = self._host.unneeded_remotes, []
        return unneeded

    @property
    def has_unneeded_remotes(self) -> bool:
        """Whether `pop_unneeded_remotes` has any to return."""
        return bool(self._host.unneeded_remotes)

    def arrived(self, load: RemoteLoad) -> None:
        """Called when the program that writes a load has been dispatched: the request continues."""
        arrived(self._host, load)

    def lost(self, load: RemoteLoad) -> None:
        """Called when a load has failed: the request computes its prompt here. Does nothing if it no longer waits."""
        lost(self._host, load)

    def hold(self, row: PlannedRow) -> StateLease:
        """Holds the state and the pages at the end of a row whose step was just dispatched, until `release_hold`."""
        return hold(self._host, row)

    def hold_cached(self, tokens: Sequence[int], salt: str | None, adapter: str | None = None) -> StateLease | None:
        """Holds the deepest state of these tokens on the device until `release_hold`. Returns None without one."""
        return hold_cached(self._host, tokens, salt, adapter)

    def hold_is_valid(self, held: StateLease) -> bool:
        """Whether the held state still exists. It is lost with the store."""
        return hold_is_valid(self._host, held)

    def release_hold(self, held: StateLease) -> None:
        """Releases it, once."""
        release_hold(self._host, held)

    # -- readings --

    @property
    def drafts(self) -> DraftPolicy:
        """Decides how many drafts a row gets."""
        return self._host.drafts

    def use_tiers(self, tiers: Tiers) -> None:
        """Called before the first step: copies evicted checkpoints to these tiers, and fetches from them."""
        self._host.tiers = tiers
        self._host.cache.leaving_to(tiers.left)

    def tell(self, journal: Journal) -> None:
        """Starts the journal of resumable states on the device and in the tiers: the present ones, and all changes."""
        self._host.journal = journal
        self._host.cache.watched_by(Publishing(journal))
        for tier in self.tiers.tiers if self.tiers is not None else ():
            tier.journal = journal
            for unit in tier.units.values():
                journal.stored(tier.name, unit.state)

    @property
    def prices(self) -> Prices:
        """Estimated times of computing and fetching."""
        return self._host.tiers.prices if self._host.tiers is not None else self._host.prices

    @property
    def weights_replaced(self) -> bool:
        """Whether the weights have been updated since the start of the process."""
        return self._host.cache.weights > 0

    @property
    def journal(self) -> Journal | None:
        """What `tell` was given."""
        return self._host.journal

    @property
    def tiers(self) -> Tiers | None:
        """The contents of the tiers below the device."""
        return self._host.tiers

    @property
    def pools(self) -> Sequence[Pool]:
        """The pools of slots and, with attention, pages, for inspection. Replaced by `reset`."""
        return self._host.cache.pools

    @property
    def index(self) -> PrefixIndex | None:
        """The prefix index, for inspection. None without a cache; replaced by `reset`."""
        return self._host.cache.index

    def check(self, *, idle: bool = False) -> None:
        """Raises `AssertionError` unless every slot, page and row id has exactly one owner; with `idle`, none may be in
        use."""
        self._host.check(idle=idle)

    def stats(self) -> dict[str, Any]:
        """Returns all counters, and the present fill levels of queues and pools."""
        queues = self._host.queues
        found = self._host.stats.snapshot()
        found["waiting"], found["running"] = len(queues.waiting), len(queues.running)
        for pool in self.pools:
            found[pool.name] = {
                "total": pool.size - 1,
                "free": len(pool.free),
                "cached": pool.num_cached,
                "used": pool.used,
            }
        if self.tiers is not None:
            found["tiers"] = self.tiers.snapshot()
        return found
