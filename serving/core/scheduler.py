"""The host's side of continuous batching: chooses the rows of the next step, and applies the result of the last one.

    plan = scheduler.schedule()          # may be called while one earlier plan is unsettled
    ... dispatch it ...
    scheduler.dispatched(plan)           # or withdraw(plan), if it could not be dispatched
    scheduler.settle(earlier, result)    # in the order of dispatch

`planning.state` has the scheduler's records, `planning.admission` decides which requests start, `planning.rows` plans
and settles a row and publishes its states and pages, and `cache.row_state` records the row that owns a slot.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from serving.core.cache.content import Chain, Scope
from serving.core.errors import FinishReason, RequestError, WaitReason
from serving.core.planning.admission import admit, admit_short, displace, refuse_impossible
from serving.core.planning.plan import Budget, RowResult, StepPlan, StepResult
from serving.core.planning.rows import after_dispatch, finish, plan_decode, plan_prefill, settle
from serving.core.planning.state import SchedulerState
from serving.core.requests.request import Request, ResultDisposition, Status
from serving.core.tiers.journal import Journal
from serving.core.tiers.tiers import Tiers


class Scheduler(SchedulerState):
    """Plans steps and settles them. Not thread-safe."""

    # -- requests --

    def add(self, request: Request) -> None:
        """Queues a request. Raises `RequestError` if it can never run or the queue is full."""
        try:
            refuse_impossible(self, request)
        except RequestError:
            self.counters.refused += 1
            raise
        self.num_arrivals += 1
        request.arrival = self.num_arrivals
        self.queues.unfinished[request.request_id] = request
        self.forget(request)
        self.counters.requests += 1
        self.queues.start(request)

    def abort(self, request_id: str) -> Request | None:
        """Ends a request at any time. Returns None if there is no such unfinished request."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """Ends a request for a reason that the scheduler does not detect (a stop text, an error)."""
        request = self.queues.unfinished.get(request_id)
        if request is not None:
            finish(self, request, reason)
        return request

    def discard(self, request_id: str) -> Request | None:
        """Ends a request whose states may be wrong, and removes all cached states of its tokens."""
        request = self.finish(request_id, FinishReason.ERROR)
        if request is not None and self.index is not None:
            scope = self.cache.scope(request.cache_salt, request.adapter)
            self.index.forget(request.tokens, scope)
            if self.tiers is not None:
                self.tiers.forget(request.tokens, scope)
        return request

    def hold_new(self) -> None:
        """Holds back the requests that are added from now on, until `release_new`."""
        self.admits_until = self.num_arrivals

    def release_new(self) -> None:
        """Ends `hold_new`: all requests may be admitted."""
        self.admits_until = None

    @property
    def has_unheld(self) -> bool:
        """Whether there is work other than the requests that `hold_new` holds back."""
        return any(not self.holds_back(request) for request in self.queues.unfinished.values())

    def reusable(
        self, tokens: Sequence[int], salt: str | None, adapter: str | None, chains: dict[Scope, Chain]
    ) -> tuple[int, int]:
        """Returns how many tokens of a prompt have a state on the device now, and how many there or in a tier below.

        Any thread may call this while another one plans. It changes nothing, and the answer is a hint. `chains`: names
        of these tokens, kept for further calls.
        """
        if self.index is None:
            return 0, 0
        scope, tiers = self.cache.scope(salt, adapter), self.tiers
        device = self.index.find(tokens, scope).position
        if tiers is None or device >= len(tokens):
            return device, device
        return device, tiers.reach(chains.setdefault(scope, Chain(scope, tiers.block)), tokens, device)

    def wait_reason(self, request: Request) -> WaitReason:
        """Returns why the last planned step did not admit a waiting request. May be called from any thread."""
        if self.holds_back(request):
            return WaitReason.PAUSED
        first = WaitReason.TURN if self.queues.free_row_ids else WaitReason.ROWS
        return self.wait_reasons.get(request, first)

    # -- steps --

    def needs_settle_before_schedule(self) -> bool:
        """Whether the unsettled step must settle before the next one can be planned.

        This is so if most rows could not take part in the next step, because the host must know their last tokens
        first. (If fewer rows need this, they skip the step, and the others continue.)
        """
        if not self.unsettled:
            return False
        running = self.queues.running
        waits = any(request.sits_out for request in running)
        return waits and 2 * sum(request.lockstep for request in running) > len(running)

    def schedule(self) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to do before an unsettled step settles, or at all."""
        if self.needs_settle_before_schedule():
            return None
        assert self.pending is None, "the last plan was neither dispatched nor withdrawn"
        assert len(self.unsettled) <= 1, "at most one step may be unsettled while another is planned"
        self.num_steps += 1
        plan = self.pending = StepPlan(self.num_steps)
        self._plan_rows(plan)
        if not plan.decode and not plan.prefill:
            self.pending = None
            return None
        return plan

    def _plan_rows(self, plan: StepPlan) -> None:
        """Adds rows to an empty plan, within a budget: decoding rows first, then prompts under way, then the queue."""
        budget = Budget(self.config)
        running = self.queues.running.copy()
        decoding = [request for request in running if request.progress.num_sampling_steps and not request.sits_out]
        prompts = [
            request
            for request in running
            if not request.progress.num_sampling_steps and not request.transfer.load and not request.blocked
        ]
        shared = len(self.queues.clients) > 1
        demands = self._prompt_demands(prompts) if shared else {}
        chosen = decoding
        if shared:
            chosen = self.fairness.decode_in_turn(decoding, demands, budget.tokens)
            self.counters.rows_stalled += len(decoding) - len(chosen)
        if chosen and self.config.num_speculative_tokens:
            self.drafts.begin(chosen)
        spare = budget.tokens - len(chosen)
        for turn in (chosen, decoding) if len(chosen) < len(decoding) else (chosen,):
            for request in turn if not plan.decode else ():  # the others, if none of those in turn finds room
                if request.status is Status.RUNNING:
                    request.queueing.decoded_at = plan.step
                    spare -= max(0, plan_decode(self, request, plan, budget, max(0, spare)))
        if not self.queues.waiting and not prompts and not self.fairness.keeps_deficits:
            return
        budget.tokens = min(budget.tokens, self.fairness.prompt_tokens(decoding=bool(plan.decode)))
        budget.grant_share()
        if shared or self.fairness.keeps_deficits:
            rows = Counter(row.request.client for row in plan.decode)
            budget.quotas = self.fairness.prompt_quotas(demands, rows, budget.tokens)
        with_quota = [client for client, quota in budget.quotas.items() if quota]
        self._plan_prompts(prompts, plan, budget)
        if budget.quotas and not plan.rows:  # those with a quota have no room
            budget.quotas = {}
            self._plan_prompts(prompts, plan, budget)
        if shared:
            fed = Counter[str | None]()
            for row in plan.rows:
                if row.is_prefill:
                    fed[row.request.client] += row.num_tokens
            self.fairness.fed(fed, with_quota, plan.step)
        if self.queues.waiting and not plan.preempted:
            displace(self, plan)

    def _prompt_demands(self, prompts: Sequence[Request]) -> Counter[str | None]:
        """Returns how many prompt tokens each client could feed in the next step, if it had the step for itself."""
        most = self.config.max_num_batched_tokens
        demands = self.queues.waiting_tokens(most) if self.queues.free_row_ids else Counter[str | None]()
        for request in prompts:
            demands[request.client] += len(request.tokens) - request.progress.num_computed
        return +demands  # without zeros

    def _plan_prompts(self, prompts: Sequence[Request], plan: StepPlan, budget: Budget) -> None:
        """Plans chunks of running prompts, then admits waiting requests: short prompts in the first half of the tokens,
        then long ones."""
        self.wait_reasons = {}
        long = [request for request in prompts if self.fairness.is_long(request)]
        if long and budget.tokens > 1:  # a single token cannot be shared, and goes to the first in order
            with budget.at_most(budget.tokens // 2):
                self._continue_prompts([request for request in prompts if request not in long], plan, budget)
                if self.queues.waiting:
                    admit_short(self, plan, budget)
            prompts = long
        self._continue_prompts(prompts, plan, budget)
        if self.queues.waiting:
            admit(self, plan, budget)

    def _continue_prompts(self, prompts: Sequence[Request], plan: StepPlan, budget: Budget) -> None:
        for request in prompts:
            if request.status is not Status.RUNNING:  # preempted for one before it
                continue
            progress = request.progress
            with budget.of(request.client):
                planned = plan_prefill(self, request, plan, budget, preempting=True) is None
            if planned and progress.set_up_due:
                progress.set_up_due = False
                plan.admitted.append(request)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Records the duration of a step on the device, from which later steps are sized to keep `max_decode_pause`."""
        num_tokens = sum(row.num_tokens for row in plan.prefill)
        if num_tokens:
            self.fairness.times.observe_prompts(num_tokens, seconds)
            self.fetch_costs.computed(num_tokens, seconds)
        elif plan.decode:
            self.fairness.times.observe_decode(len(plan.decode), seconds)

    def dispatched(self, plan: StepPlan) -> None:
        """Called when the step is dispatched: publishes the prompt states and pages that it computes."""
        assert plan is self.pending, "only the latest plan can be dispatched, once"
        self.pending = None
        for row in plan.effects:
            if row.fate is ResultDisposition.LIVE:
                after_dispatch(self, row)
        counters = self.counters
        for request in plan.admitted:
            lookup = request.lookup
            if not lookup.final and not request.finished:
                lookup.final = True
                counters.prompt_tokens += request.prompt_len
                counters.cached_tokens += lookup.num_cached_tokens
                counters.stateless_tokens += lookup.num_stateless_tokens
                counters.full_hits += lookup.num_cached_tokens == request.prompt_len
                if lookup.miss_reason is not None:
                    counters.misses[lookup.miss_reason] += 1
        counters.steps += 1
        self.unsettled.append(plan)

    def withdraw(self, plan: StepPlan) -> None:
        """Undoes a step that could not be dispatched. Nothing of it is published.

        Requests that it preempted stay in the queue, and entries that it evicted stay evicted.
        """
        assert plan is self.pending, "only the latest plan can be withdrawn, before it is dispatched"
        self.pending = None
        self.counters.withdrawn += 1
        for row in plan.rows:
            if row.fate is ResultDisposition.LIVE:
                request = row.request
                self.undo(request)
                if request not in plan.admitted:
                    self.return_surplus(request)
                    request.progress.state.trim(request.progress.last_access)
        for request in plan.admitted:
            if request.status is Status.RUNNING:
                self.requeue(request)

    def settle(self, plan: StepPlan, result: StepResult) -> list[RowResult]:
        """Takes a step's result, in the order of dispatch. Returns the valid tokens by request.

        Results of a step that a `reset` wrote off are ignored.
        """
        if not self.unsettled or plan is not self.unsettled[0]:
            assert all(row.fate is ResultDisposition.DROPPED for row in plan.rows), "steps settle in order"
            return []
        self.unsettled.popleft()
        return settle(self, plan, result)

    def reset(self) -> None:
        """Called when the store is lost: removes all checkpoints and pages, and queues all running requests again.

        Settled tokens are kept. Unsettled steps are ignored.
        """
        for plan in (*self.unsettled, *filter(None, [self.pending])):
            for row in plan.rows:
                row.fate = ResultDisposition.DROPPED
        self.unsettled.clear()
        self.pending = None
        self.cache.clear()
        stopped = self.queues.stop_all()
        for request in self.queues.unfinished.values():
            request.queueing.prompt_done = False
            self.forget(request)
        for request in stopped:
            self.queues.enqueue(request)
        self.counters.resets += 1

    def drop_cached(self) -> None:
        """Drops all cached prefixes, on the device and in the tiers. Running requests keep theirs."""
        if self.index is not None:
            self.index.forget()
        if self.tiers is not None:
            self.tiers.clear()

    def change_weights(self, lineage: int = 0) -> None:
        """Called after a weight update: cached prefixes are no longer found, and every unfinished request
        is computed again from its tokens. No step may be unsettled.

        `lineage`: identifies the weights among replicas (`Scope`).
        """
        assert not self.unsettled, "a step under the old weights has not been settled"
        assert self.pending is None, "a step under the old weights has been planned"
        for request in self.queues.running.copy():
            self.requeue(request)
        self.cache.outdate(lineage)
        for request in self.queues.unfinished.values():
            request.queueing.prompt_done = False
            self.forget(request)
        self.counters.weight_changes += 1

    # -- readings --

    def use_tiers(self, tiers: Tiers) -> None:
        """Called before the first step: copies evicted checkpoints to these tiers, and fetches from them."""
        self.tiers, self.fetch_costs = tiers, tiers.fetch_costs
        self.cache.observe(tiers)

    def tell(self, journal: Journal) -> None:
        """Starts the journal of resumable states on the device and in the tiers: the present ones, and all changes."""
        self.journal = journal
        self.cache.observe(journal)
        for tier in self.tiers.tiers if self.tiers is not None else ():
            tier.journal = journal
            for unit in tier.units.values():
                journal.stored(tier.name, unit.state)

    def stats(self) -> dict[str, Any]:
        """Returns all counters, and the present fill levels of queues and pools."""
        queues = self.queues
        found = self.counters.snapshot()
        found["waiting"], found["running"] = len(queues.waiting), len(queues.running)
        for pool in self.cache.pools:
            found[pool.name] = {
                "total": pool.total,
                "free": pool.total - pool.used - pool.num_cached,
                "cached": pool.num_cached,
                "used": pool.used,
            }
        if self.tiers is not None:
            found["tiers"] = self.tiers.snapshot()
        return found
