"""The host's side of continuous batching: which rows the next step has, and what became of the last one.

    plan = scheduler.schedule()          # may be called while one earlier plan is unsettled
    ... dispatch it ...
    scheduler.dispatched(plan)           # or withdraw(plan), if it could not be dispatched
    scheduler.settle(earlier, result)    # in the order of dispatch

Decoding rows come first, then prompts under way, then the queue (by priority, then arrival). See `host_state` for the
resources, `prefill_planning` and `decode_planning` for the rows, `publication` for what becomes findable when.
"""

from typing import Any

from serving.core.admission import admit, refuse_impossible
from serving.core.budget import Budget
from serving.core.config import SchedulerConfig
from serving.core.decode_planning import plan_decode
from serving.core.drafts import DraftPolicy
from serving.core.host_state import HostState
from serving.core.plan import DecodeRow, Emitted, Fate, PrefillRow, StepPlan, StepResult
from serving.core.policy import CachePolicy
from serving.core.prefill_planning import plan_catch_up
from serving.core.publication import after_dispatch
from serving.core.reasons import FinishReason, RequestRefused
from serving.core.remote import Hold, Load, RemoteState, arrived, hold, hold_is_valid, lost, release_hold
from serving.core.request import Request, Status
from serving.core.settlement import finish, settle


class Scheduler:
    """Plans steps and settles them. Not safe for use by several threads at once."""

    def __init__(
        self, config: SchedulerConfig, *, policy: CachePolicy | None = None, drafts: DraftPolicy | None = None
    ) -> None:
        self.config = config
        drafts = drafts if drafts is not None else DraftPolicy(config.num_speculative_tokens)
        self.host = HostState(config, policy if policy is not None else CachePolicy(config), drafts)
        self._arrivals = 0
        self._steps = 0

    # -- requests --

    def add(self, request: Request) -> None:
        """Queue a request. Raises `RequestRefused`, one line, if it can never run or the queue is full."""
        try:
            refuse_impossible(self.host, request)
        except RequestRefused:
            self.host.stats.refused += 1
            raise
        self._arrivals += 1
        request.arrival = self._arrivals
        self.host.requests[request.request_id] = request
        self.host.stats.requests += 1
        self.host.enqueue(request)

    def abort(self, request_id: str) -> Request | None:
        """End a request at any moment; None if there is no such request (any more)."""
        return self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> Request | None:
        """End a request for a reason that the scheduler cannot see (a stop string, an error)."""
        request = self.host.requests.get(request_id)
        if request is not None:
            finish(self.host, request, reason)
        return request

    @property
    def waiting(self) -> list[Request]:
        """The queue, first come first."""
        return self.host.waiting

    @property
    def running(self) -> list[Request]:
        """The seated requests, first come first."""
        return self.host.running

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to do."""
        return bool(self.host.requests)

    # -- steps --

    def needs_settle_before_schedule(self) -> bool:
        """Whether the unsettled step must settle before the next one can be planned.

        So it is without overlap, and when a running request needs the host to know its last tokens.
        """
        if not self.host.unsettled:
            return False
        return not self.config.overlap or any(request.lockstep and request.flights for request in self.host.running)

    def schedule(self) -> StepPlan | None:
        """Plan the next step; None if there is nothing to do before an unsettled step settles, or at all."""
        if self.needs_settle_before_schedule():
            return None
        host = self.host
        assert host.pending is None, "the last plan was neither dispatched nor withdrawn"
        assert len(host.unsettled) <= 1, "at most one step may be unsettled while another is planned"
        self._steps += 1
        plan = host.pending = StepPlan(self._steps)
        budget = Budget(self.config)
        running = host.running.copy()
        decoding = 0
        for request in running:
            if request.num_sampling_steps:
                decoding += 1
        if decoding and self.config.num_speculative_tokens:
            host.drafts.begin([request for request in running if request.num_sampling_steps])
        spare = budget.tokens - decoding
        for request in running:
            if request.num_sampling_steps and request.status is Status.RUNNING:
                spare -= max(0, plan_decode(host, request, plan, budget, max(0, spare)))
        if decoding < len(running) or host.waiting:
            budget.grant_share()
            for request in running:
                if request.num_sampling_steps or request.status is not Status.RUNNING or request.load is not None:
                    continue
                if plan_catch_up(host, request, plan, budget, preempting=True) and request.seat_due:
                    request.seat_due = False
                    plan.seats.append(request)
            if host.waiting:
                admit(host, plan, budget)
        if not plan.decode and not plan.prefill:
            host.pending = None
            return None
        return plan

    def dispatched(self, plan: StepPlan) -> None:
        """The step is in the device's queue: what it computes of prompts may be found by later steps."""
        host = self.host
        assert plan is host.pending, "only the latest plan can be dispatched, once"
        host.pending = None
        plan.dispatched = True
        for row in plan.effects:
            if row.fate is Fate.LIVE:
                after_dispatch(host, row)
        for request in plan.seats:
            if not request.counted and not request.finished:
                request.counted = True
                self._count_admission(request)
        host.stats.steps += 1
        host.unsettled.append(plan)

    def _count_admission(self, request: Request) -> None:
        stats = self.host.stats
        stats.prompt_tokens += request.prompt_len
        stats.cached_tokens += request.num_cached_tokens
        stats.full_hits += request.num_cached_tokens == request.prompt_len
        if request.miss_reason is not None:
            stats.misses[request.miss_reason] += 1

    def withdraw(self, plan: StepPlan) -> None:
        """The step could not be dispatched: everything is as before it was planned, and nothing of it findable.

        Requests that it preempted stay in the queue, and what was evicted for it stays evicted.
        """
        host = self.host
        assert plan is host.pending, "only the latest plan can be withdrawn, before it is dispatched"
        host.pending = None
        host.stats.withdrawn += 1
        for row in plan.rows:
            if row.fate is Fate.LIVE:
                host.undo(row)
                if row.request not in plan.seats:
                    host.return_surplus(row.request)
                    host.trim_slots(row.request)
        for request in plan.seats:
            if request.status is Status.RUNNING:
                host.leave(request)
                host.release_all(request, Fate.DROPPED)
                host.enqueue(request)

    def settle(self, plan: StepPlan, result: StepResult) -> list[Emitted]:
        """Take a step's result, in the order of dispatch; returns the tokens that count, request by request.

        Results of a step that a `reset` wrote off are ignored.
        """
        host = self.host
        if not host.unsettled or plan is not host.unsettled[0]:
            assert all(row.fate is Fate.DROPPED for row in plan.rows), "steps settle in order"
            return []
        host.unsettled.popleft()
        return settle(host, plan, result)

    def reset(self) -> None:
        """The store is lost: forget every checkpoint and page, and queue every request to be computed again.

        Tokens that were settled are kept; steps that were not settled mean nothing any more.
        """
        host = self.host
        plans = [*host.unsettled, *([host.pending] if host.pending is not None else [])]
        for plan in plans:
            for row in plan.rows:
                row.fate = Fate.DROPPED
        host.unsettled.clear()
        host.pending = None
        seated, host.running[:] = host.running.copy(), []
        for request in host.requests.values():
            request.prompt_done = False
        for request in seated:
            host.forget(request)
            host.enqueue(request)
        host.new_pools()
        host.stats.resets += 1

    # -- states from and for other workers; see `remote` --

    def take_loads(self) -> list[Load]:
        """Requests that began to wait for a remote state since the last call. Some may wait no more: see `valid`."""
        loads, self.host.loads = self.host.loads, []
        return loads

    def take_spared(self) -> list[RemoteState]:
        """Remote states that their requests, since the last call, turned out not to need (any more)."""
        spared, self.host.spared = self.host.spared, []
        return spared

    def arrived(self, load: Load) -> None:
        """The program that writes a load into its slot and pages is in the device's queue: the request goes on."""
        arrived(self.host, load)

    def lost(self, load: Load) -> None:
        """A load will not arrive: the request computes its prompt here. Nothing happens if it waits no more."""
        lost(self.host, load)

    def hold(self, row: DecodeRow | PrefillRow) -> Hold:
        """Keep the state and the pages at the end of a row whose step was just dispatched, until `release_hold`."""
        return hold(self.host, row)

    def hold_is_valid(self, held: Hold) -> bool:
        """Whether what is held is still there: it goes with the store."""
        return hold_is_valid(self.host, held)

    def release_hold(self, held: Hold) -> None:
        """Let go of it, once."""
        release_hold(self.host, held)

    # -- accounts --

    def check(self, *, idle: bool = False) -> None:
        """Raise `AssertionError` unless every slot, page and seat is accounted for; `idle`: and none is in use."""
        self.host.check(idle=idle)

    def stats(self) -> dict[str, Any]:
        """All counters, and how full queues and pools are now."""
        host = self.host
        found = host.stats.snapshot()
        found["waiting"], found["running"] = len(host.waiting), len(host.running)
        pools: list[Any] = [host.slots] if host.pages is None else [host.slots, host.pages]
        for pool in pools:
            found[pool.name] = {
                "total": pool.size - 1,
                "free": len(pool.free),
                "cached": pool.num_cached,
                "used": pool.used,
            }
        return found
