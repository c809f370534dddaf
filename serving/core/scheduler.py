"""The host's side of continuous batching: which rows the next step has, and what became of the last one.

    plan = scheduler.schedule()          # may be called while one earlier plan is unsettled
    ... dispatch it ...
    scheduler.dispatched(plan)           # or withdraw(plan), if it could not be dispatched
    scheduler.settle(earlier, result)    # in the order of dispatch

Decoding rows come first, then prompts being prefilled, then the queue (by priority, then arrival); `planning.fairness`
says which prompts may overtake. See `planning.host_state` for what is known, `planning.prefill` and `planning.decode`
for the rows, `planning.publication` for what becomes findable when, and `cache.row_state` for whose a slot is.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from serving.core.cache.pools import Pool
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import Scope
from serving.core.cache.retention import RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.planning.admission import admit, admit_short, displace, refuse_impossible, why_wait
from serving.core.planning.budget import Budget
from serving.core.planning.decode import plan_decode
from serving.core.planning.host_state import HostState
from serving.core.planning.plan import Emitted, StepPlan, StepResult
from serving.core.planning.prefill import plan_prefill
from serving.core.planning.publication import after_dispatch
from serving.core.planning.remote import Hold, arrived, hold, hold_cached, hold_is_valid, lost, release_hold
from serving.core.planning.settlement import finish, settle
from serving.core.reasons import FinishReason, RequestError, WaitReason
from serving.core.requests.drafts import DraftPolicy
from serving.core.requests.request import Fate, PlannedRow, RemoteLoad, RemoteState, Request, Status
from serving.core.tiers.content import Chain
from serving.core.tiers.journal import Journal
from serving.core.tiers.prices import Prices
from serving.core.tiers.publishing import Publishing
from serving.core.tiers.tiers import Tiers


class Scheduler:
    """Plans steps and settles them. Not safe for use by several threads at once."""

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
        """Queue a request. Raises `RequestError`, one line, if it can never run or the queue is full."""
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
        """End a request at any moment; None if there is no such request (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request for a reason that the scheduler cannot see (a stop string, an error)."""
        request = self._host.queues.unfinished.get(request_id)
        if request is not None:
            finish(self._host, request, reason)
        return request

    def discard(self, request_id: str) -> Request | None:
        """End a request whose states may be wrong, and drop every cached state that its tokens lead to."""
        request = self.finish(request_id, FinishReason.ERROR)
        if request is not None and self.index is not None:
            scope = self._host.cache.scope(request.cache_salt)
            self.index.forget(request.tokens, scope)
            if self.tiers is not None:
                self.tiers.forget(request.tokens, scope)
        return request

    def hold_new(self) -> None:
        """Admit none of the requests that are added from now on, until `release_new`."""
        self._host.admits_until = self._arrivals

    def release_new(self) -> None:
        """Admit all again."""
        self._host.admits_until = None

    @property
    def has_unheld(self) -> bool:
        """Whether anything is left to do but what `hold_new` holds back."""
        return any(not self._host.holds_back(request) for request in self._host.queues.unfinished.values())

    def resumable(self, tokens: Sequence[int], salt: str | None) -> int:
        """Tokens of a prompt that would not have to be computed if it were admitted now.

        Any thread may ask while another one plans: nothing is moved, and the answer is a hint.
        """
        index = self.index
        return 0 if index is None else index.find(tokens, self._host.cache.scope(salt)).position

    def fetchable(self, tokens: Sequence[int], salt: str | None, beyond: int, chains: dict[Scope, Chain]) -> int:
        """Tokens of a prompt that a tier below the device has a state after; `beyond` if it has none after more.

        Any thread may ask, as with `resumable`. `chains`: what these tokens are called, for others that ask.
        """
        tiers = self.tiers
        if tiers is None or self.index is None or beyond >= len(tokens):
            return beyond
        scope = self._host.cache.scope(salt)
        return tiers.reach(chains.setdefault(scope, Chain(scope, tiers.block)), tokens, beyond)

    @property
    def waiting(self) -> list[Request]:
        """The queue, first come first."""
        return self._host.queues.waiting

    def why_wait(self, requests: Iterable[Request]) -> list[WaitReason]:
        """Why requests of `waiting` have not been admitted. May be called from any thread, for a picture."""
        return why_wait(self._host, requests)

    @property
    def running(self) -> list[Request]:
        """The requests that have a row id, first come first."""
        return self._host.queues.running

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self._host.queues.unfinished)

    # -- steps --

    def needs_settle_before_schedule(self) -> bool:
        """Whether the unsettled step must settle before the next one can be planned.

        So it is without overlap, and where most rows would have to sit out the next step, because the host must know
        their last tokens first. (Where fewer do, they sit it out, and the others go on.)
        """
        host = self._host
        if not host.unsettled:
            return False
        if not self.config.overlap:
            return True
        running = host.queues.running
        return any(map(_sits_out, running)) and 2 * sum(request.lockstep for request in running) > len(running)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do before an unsettled step settles, or at all."""
        if self.needs_settle_before_schedule():
            return None
        host = self._host
        assert host.pending is None, "the last plan was neither dispatched nor withdrawn"
        assert len(host.unsettled) <= 1, "at most one step may be unsettled while another is planned"
        self._steps += 1
        plan = host.pending = StepPlan(self._steps)
        budget = Budget(self.config)
        running = host.queues.running.copy()
        decoding = [request for request in running if request.progress.num_sampling_steps and not _sits_out(request)]
        if decoding and self.config.num_speculative_tokens:
            host.drafts.begin(decoding)
        spare = budget.tokens - len(decoding)
        for request in decoding:
            if request.status is Status.RUNNING:
                spare -= max(0, plan_decode(host, request, plan, budget, max(0, spare)))
        prefilling = any(not request.progress.num_sampling_steps for request in running)
        if prefilling or host.queues.waiting:
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
                    self._continue([request for request in prompts if request not in long], plan, budget)
                    if host.queues.waiting:
                        admit_short(host, plan, budget)
                prompts = long
            self._continue(prompts, plan, budget)
            if host.queues.waiting:
                admit(host, plan, budget)
        if not plan.decode and not plan.prefill:
            host.pending = None
            return None
        return plan

    def _continue(self, prompts: Sequence[Request], plan: StepPlan, budget: Budget) -> None:
        """Give running requests that prefill their next chunks, as far as there is room."""
        for request in prompts:
            if request.status is not Status.RUNNING:  # preempted for one before it
                continue
            progress = request.progress
            if plan_prefill(self._host, request, plan, budget, preempting=True) and progress.set_up_due:
                progress.set_up_due = False
                plan.admitted.append(request)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long on the device; later ones are sized by it to keep to `max_decode_pause`."""
        num_tokens = sum(row.num_tokens for row in plan.prefill)
        if num_tokens:
            self._host.fairness.observe(num_tokens, seconds)
            self.prices.computed(num_tokens, seconds)

    def dispatched(self, plan: StepPlan) -> None:
        """The step is in the device's queue: what it computes of prompts may be found by later steps."""
        host = self._host
        assert plan is host.pending, "only the latest plan can be dispatched, once"
        host.pending = None
        plan.dispatched = True
        for row in plan.effects:
            if row.fate is Fate.LIVE:
                after_dispatch(host, row)
        for request in plan.admitted:
            if not request.lookup.final and not request.finished:
                request.lookup.final = True
                self._count_admission(request)
        host.stats.steps += 1
        host.unsettled.append(plan)

    def _count_admission(self, request: Request) -> None:
        stats, lookup = self._host.stats, request.lookup
        stats.prompt_tokens += request.prompt_len
        stats.cached_tokens += lookup.num_cached_tokens
        stats.full_hits += lookup.num_cached_tokens == request.prompt_len
        if lookup.miss_reason is not None:
            stats.misses[lookup.miss_reason] += 1

    def withdraw(self, plan: StepPlan) -> None:
        """The step could not be dispatched: everything is as before it was planned, and nothing of it findable.

        Requests that it preempted stay in the queue, and what was evicted for it stays evicted.
        """
        host = self._host
        assert plan is host.pending, "only the latest plan can be withdrawn, before it is dispatched"
        host.pending = None
        host.stats.withdrawn += 1
        for row in plan.rows:
            if row.fate is Fate.LIVE:
                request = row.request
                host.undo(request)
                if request not in plan.admitted:
                    host.return_surplus(request)
                    request.progress.state.trim(request.progress.last_access)
        for request in plan.admitted:
            if request.status is Status.RUNNING:
                host.queues.leave(request)
                host.release_all(request, Fate.DROPPED)
                host.queues.enqueue(request)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Emitted]:
        """Take a step's result, in the order of dispatch; returns the tokens that count, request by request.

        Results of a step that a `reset` wrote off are ignored.
        """
        host = self._host
        if not host.unsettled or plan is not host.unsettled[0]:
            assert all(row.fate is Fate.DROPPED for row in plan.rows), "steps settle in order"
            return []
        host.unsettled.popleft()
        return settle(host, plan, result)

    def reset(self) -> None:
        """The store is lost: forget every checkpoint and page, and queue every request to be computed again.

        Tokens that were settled are kept; steps that were not settled mean nothing any more.
        """
        host = self._host
        plans = [*host.unsettled, *([host.pending] if host.pending is not None else [])]
        for plan in plans:
            for row in plan.rows:
                row.fate = Fate.DROPPED
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
        """Drop all cached prefixes, here and in the tiers. Requests that run keep what they use."""
        if self._host.cache.index is not None:
            self._host.cache.index.drop_all()
        if self._host.tiers is not None:
            self._host.tiers.clear()

    def change_weights(self, lineage: int = 0) -> None:
        """The model's weights are others from now on: what is cached is not found any more, and whatever is unfinished
        is computed again from its tokens. No step may be unsettled.

        `lineage`: which ones, for replicas (`Scope`).
        """
        host = self._host
        assert not host.unsettled, "a step under the old weights has not been settled"
        assert host.pending is None, "a step under the old weights has been planned"
        for request in host.queues.running.copy():
            host.queues.leave(request)
            host.release_all(request, Fate.DROPPED)
            host.queues.enqueue(request)
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
        """Requests that began to wait for a remote state since the last call. Some may wait no more: see `valid`."""
        loads, self._host.loads = self._host.loads, []
        return loads

    def take_fetches(self) -> list[RemoteLoad]:
        """Requests that began to wait for a state from a tier since the last call; as with `take_loads`."""
        fetches, self._host.fetches = self._host.fetches, []
        return fetches

    def pop_unneeded_remotes(self) -> list[RemoteState]:
        """Remote states that their requests, since the last call, turned out not to need (any more)."""
        unneeded, self._host.unneeded_remotes = self._host.unneeded_remotes, []
        return unneeded

    @property
    def has_unneeded_remotes(self) -> bool:
        """Whether `pop_unneeded_remotes` has any to return."""
        return bool(self._host.unneeded_remotes)

    def arrived(self, load: RemoteLoad) -> None:
        """The program that writes a load into its slot and pages is in the device's queue: the request goes on."""
        arrived(self._host, load)

    def lost(self, load: RemoteLoad) -> None:
        """A load will not arrive: the request computes its prompt here. Nothing happens if it waits no more."""
        lost(self._host, load)

    def hold(self, row: PlannedRow) -> Hold:
        """Keep the state and the pages at the end of a row whose step was just dispatched, until `release_hold`."""
        return hold(self._host, row)

    def hold_cached(self, tokens: Sequence[int], salt: str | None) -> Hold | None:
        """Keep the deepest state of these tokens that the device has until `release_hold`; None if it has none."""
        return hold_cached(self._host, tokens, salt)

    def hold_is_valid(self, held: Hold) -> bool:
        """Whether what is held is still there: it goes with the store."""
        return hold_is_valid(self._host, held)

    def release_hold(self, held: Hold) -> None:
        """Let go of it, once."""
        release_hold(self._host, held)

    # -- readings --

    @property
    def drafts(self) -> DraftPolicy:
        """Decides how many drafts a row gets."""
        return self._host.drafts

    def use_tiers(self, tiers: Tiers) -> None:
        """Before the first step: have evicted checkpoints go to these tiers, and requests fetch from them."""
        self._host.tiers = tiers
        self._host.cache.leaving_to(tiers.left)

    def tell(self, journal: Journal) -> None:
        """Write down what can be gone on from, on the device and below it: what is there now, and all that changes."""
        self._host.journal = journal
        self._host.cache.watched_by(Publishing(journal))
        for tier in self.tiers.tiers if self.tiers is not None else ():
            tier.journal = journal
            for unit in tier.units.values():
                journal.stored(tier.name, unit.state)

    @property
    def prices(self) -> Prices:
        """What computing and fetching take."""
        return self._host.tiers.prices if self._host.tiers is not None else self._host.prices

    @property
    def weights_replaced(self) -> bool:
        """Whether the weights are others than those that the process began with."""
        return self._host.cache.weights > 0

    @property
    def journal(self) -> Journal | None:
        """What `tell` was given."""
        return self._host.journal

    @property
    def tiers(self) -> Tiers | None:
        """What is held below the device."""
        return self._host.tiers

    @property
    def pools(self) -> Sequence[Pool]:
        """Slots and, for a model with attention, pages: to look at. Others after a `reset`."""
        return self._host.cache.pools

    @property
    def index(self) -> PrefixIndex | None:
        """What is cached: to look at. None where nothing is; another one after a `reset`."""
        return self._host.cache.index

    def check(self, *, idle: bool = False) -> None:
        """Raise `AssertionError` unless every slot, page and row id is accounted for; `idle`: and none is in use."""
        self._host.check(idle=idle)

    def stats(self) -> dict[str, Any]:
        """All counters, and how full queues and pools are now."""
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


def _sits_out(request: Request) -> bool:
    """Whether a request needs what the host does not know yet: its last tokens, or what the engine makes of them."""
    return request.lockstep and (request.blocked or any(row.sample for row in request.progress.unsettled))
