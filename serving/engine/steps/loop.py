"""The step loop: schedules, dispatches and settles steps. It dispatches a step before it reads the previous results."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from checkpoints.errors import one_line
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch, SeatBatch
from mamba_jax.programs import Batch, RowsBatch, StepPrograms, abstract
from mamba_jax.rows import Rows
from mamba_jax.sampling.masks import MaskBatch
from mamba_jax.store import Store
from serving.core.planning.plan import DecodeRow, StepPlan
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from serving.engine.requests.request import Choice
from serving.engine.stats import LoopStats
from serving.engine.steps.batching import BatchBuilder
from serving.engine.steps.results import DispatchedStep, StateError
from serving.engine.structured.mask_workers import MaskWorkers
from serving.state_transfer.source import Inbox, StateSource

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of consecutive failed steps after which the loop treats the fault as permanent."""


class PlanError(RuntimeError):
    """A plan could not be converted to arrays, because of a bug. The loop has withdrawn the plan; nothing else is lost.

    `requests`: the requests with the invalid rows. They must end, otherwise every later plan that contains them fails.
    """

    def __init__(self, message: str, requests: Sequence[Request]) -> None:
        super().__init__(message)
        self.requests = list(requests)


class Followers(Protocol):
    """The other hosts of an engine's mesh, which dispatch the same programs as this host. See `serving/hosts`."""

    def call(self, batch: Batch) -> None:
        """Makes all followers dispatch this batch's program, after the programs of earlier calls."""

    def step_failed(self, error: BaseException) -> None:
        """Reports that this host has lost its store, without which the other hosts' stores are useless. Does not
        return."""

    def done(self) -> None:
        """Reports that no step will follow."""


class StepLoop:
    """Runs the scheduler's plans on the device.

    Args:
        scheduler: plans each step.
        programs: the compiled steps.
        batches: converts plans to arrays.
        make_store, make_rows: create an empty store and empty seats; called at start and after a failed step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        programs: StepPrograms,
        batches: BatchBuilder,
        *,
        make_store: Callable[[], Store],
        make_rows: Callable[[], Rows],
    ) -> None:
        self.scheduler, self.programs, self.batches = scheduler, programs, batches
        self.stats = LoopStats()
        self.fault: Callable[[StepPlan], None] | None = None
        """For tests: called after a step's programs are dispatched. It may raise the errors of a failing device."""
        self.sources: list[StateSource] = []
        """Sources of states that are not on this engine's device: other workers, and tiers below the device."""
        self.inbox = Inbox()
        """What other threads post to the engine's thread."""
        self.mask_workers = MaskWorkers(batches.heads, self.inbox)
        self.followers: Followers | None = None
        """The other hosts; only set on the host that leads them."""
        self._make_store, self._make_rows = make_store, make_rows
        self._store: Store | None = make_store()
        self._rows: Rows | None = make_rows()
        self._checks_tags = self._store.tags is not None
        self._flight: DispatchedStep | None = None
        self._settling = False
        self._failed_in_a_row = self._unplanned_in_a_row = 0
        self._last_read = 0.0
        self.leaving = threading.Event()
        """Any thread sets this at shutdown. It ends a warm-up, which can take minutes."""

    @property
    def busy(self) -> bool:
        """Whether the loop has work to do."""
        scheduler = self.scheduler
        if self._flight is not None or scheduler.queues.unfinished or scheduler.unneeded_remotes:
            return True
        return any(source.busy for source in self.sources)

    @property
    def in_flight(self) -> bool:
        """Whether a dispatched step has not been settled."""
        return self._flight is not None or self._settling

    @property
    def store(self) -> Store | None:
        """The current store, which the next step consumes. None after a failure, until the next step."""
        return self._store

    def close(self) -> None:
        """Ends the loop. Writes the device's cached states to the disk tier, if there is one. No step may follow."""
        for source in self.sources:
            source.close(self)
        if self.followers is not None:
            self.followers.done()

    def run(self, batch: Batch) -> Any:
        """Dispatches one program over the store and the seats. Steps use the device only through this method.

        Returns:
            The program's output for the host: a `StepOutput`; for a mixed step one for the decode rows and one for the
            prefill rows; None for a batch that changes only seats.
        """
        store, rows = self.take_store()
        if self.followers is not None:
            self.followers.call(batch)
        if isinstance(batch, RowsBatch):
            self._rows = self.programs.change_rows(rows, batch)
            return None
        self._store, self._rows, output = self.programs.step(store, rows, batch)
        return output

    def replace_store(self, change: Callable[[Store], Store]) -> None:
        """Dispatches a program over the store outside of any step. If `change` raises, the store counts as lost."""
        assert self.followers is None, "other hosts would not do the same"
        store, _ = self.take_store()
        self._store = None
        self._store = change(store)

    def free_store(self) -> None:
        """Frees the memory of states and pages. No step may be in flight. Running requests will be computed again.

        The next step, or `take_store`, allocates the memory again.
        """
        assert not self.in_flight, "a step in flight needs the store"
        assert self.followers is None, "other hosts would not do the same"
        for leaf in jax.tree.leaves((self._store, self._rows)):
            leaf.delete()
        self._store = self._rows = None
        self.scheduler.reset()

    def take_store(self) -> tuple[Store, Rows]:
        """Returns the store and the seats. Creates empty ones if there are none."""
        if self._store is None or self._rows is None:
            self._store, self._rows = self._make_store(), self._make_rows()
            self.batches.tables.forget()
        return self._store, self._rows

    @property
    def shapes(self) -> tuple[Store, Rows]:
        """Abstract shapes of the store and the seats, for compilation: each step replaces the arrays themselves. The
        store must exist."""
        assert self._store is not None
        return abstract(self._store), abstract(self._rows)

    def step(self) -> DispatchedStep | None:
        """Dispatches the next step, then settles the previous one. Returns None if no step was settled.

        Raises:
            PlanError: a plan could not be converted to arrays; the step in flight continues.
            Exception: steps keep failing, or a bug or an interrupt occurred. No step is in flight any more, and all
                requests are queued to be computed again.
        """
        return self._turn(self._plan)

    def drain(self) -> DispatchedStep | None:
        """Settles the step in flight, if there is one, without dispatching another. Raises the errors of `step`."""
        return self._turn(lambda: None)

    def _turn(self, make_plan: Callable[[], StepPlan | None]) -> DispatchedStep | None:
        before, self._flight = self._flight, None
        self._settling = before is not None
        try:
            self._exchange()
            plan = make_plan()
            if plan is not None:
                self._flight = self._dispatch(plan)
            self._exchange()
            self._settling = False
            if before is not None:
                self._settle(before)
                self._failed_in_a_row = 0
            return before
        except PlanError:
            self._flight = before  # this step is still running and is not affected
            raise
        except BaseException as error:
            self._forget()
            if self.followers is not None:
                self.followers.step_failed(error)
            # XLA raises RuntimeErrors. Bugs, interrupts and repeated failures are not retried.
            transient = isinstance(error, RuntimeError | MemoryError) and not isinstance(error, StateError)
            if not transient or self._failed_in_a_row >= MAX_FAILURES:
                raise
            log.warning("a step failed; everything that ran is computed again: %s", one_line(error))
            return None

    def _exchange(self) -> None:
        loads, self.scheduler.loads = self.scheduler.loads, []
        for load in loads:
            if load.valid:
                load.remote.source.fetch(self, load)
        for remote in self.scheduler.pop_unneeded_remotes():
            remote.source.cancel(remote)
        self.inbox.take_all(idle=not self.in_flight)
        for source in self.sources:
            source.exchange(self)

    def _plan(self) -> StepPlan | None:
        begin = time.perf_counter()
        self.mask_workers.collect()
        lockstep = self.scheduler.needs_settle_before_schedule()
        self.stats.lockstep_steps += lockstep
        plan = None if lockstep else self.scheduler.schedule()
        if plan is None and not self._settling and self.mask_workers.collect(idle=True):
            plan = self.scheduler.schedule()
        for source in self.sources:
            # States evicted for this plan stay intact in the store until the plan or an arrival is dispatched.
            source.copy_out(self._store)
        self.stats.plan_seconds += time.perf_counter() - begin
        return plan

    def _dispatch(self, plan: StepPlan) -> DispatchedStep:
        begin = time.perf_counter()
        step = DispatchedStep(plan, begin, self.programs.compilations)
        try:
            batches = self._make_batches(plan)
        except Exception as error:
            guilty = self._guilty(plan)
            # The device has computed nothing, so no state of this plan may become findable in the cache.
            self.scheduler.withdraw(plan)
            self.batches.tables.forget()
            self._unplanned_in_a_row += 1
            if not guilty and self._unplanned_in_a_row >= MAX_FAILURES:
                guilty = [row.request for row in plan.rows]  # the batch fails, but no single row does
            raise PlanError(f"step {plan.step} could not be turned into arrays: {error}", guilty) from error
        self._unplanned_in_a_row = 0
        built = time.perf_counter()
        for batch in batches:
            output = self.run(batch)
            if isinstance(batch, MixedBatch):
                step.outputs = list(output)
                self.stats.mixed_steps += 1
            elif isinstance(batch, DecodeBatch):
                step.outputs[0] = output
            elif isinstance(batch, PrefillBatch):
                step.outputs[1] = output
        step.start_reading()
        self.stats.decode_rows += len(plan.decode)
        self.stats.prefill_tokens += sum(row.num_tokens for row in plan.prefill)
        if self.fault is not None:
            self.fault(plan)
        done = time.perf_counter()
        self.scheduler.dispatched(plan)
        for source in self.sources:
            source.dispatched(self, plan)
        self.stats.steps += 1
        self.stats.dispatch_seconds += done - built
        self.stats.plan_seconds += built - begin + time.perf_counter() - done
        return step

    def _make_batches(self, plan: StepPlan) -> list[Batch]:
        """Returns the batches of a plan in order: changes of seats, then one mixed batch, or one of each kind."""
        seats = [self.seat(request) for request in plan.admitted]
        steps = self.batches.step(plan.decode, plan.prefill)
        return [*seats, *self.batches.tables.take_whole(), *self.masks(plan), *steps]

    def seat(self, request: Request) -> SeatBatch:
        """Returns the sampling parameters of a request that takes a seat."""
        choice: Choice = request.user
        metrics = choice.parent.output.metrics
        if metrics is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = time.monotonic()
        adapter = choice.parent.adapter
        return self.batches.seat(
            request.progress.row_id,
            request.sampling,
            seed=choice.seed,
            choice=choice.index,
            prompt=choice.parent.output.prompt_token_ids,
            output=request.output_token_ids,
            stop_ids=sorted(request.stop_token_ids),
            vocab_size=self.programs.vocab_size,
            adapter=0 if adapter is None else adapter.entry,
        )

    def masks(self, plan: StepPlan) -> Iterable[MaskBatch]:
        """Returns the masks of tokens that rows with a grammar may choose, at each position that the step verifies.

        Such rows run in lockstep: their last step has settled, and masks for all its drafts are computed. This method
        reads nothing from the device, which may be busy with a step without these rows.
        """
        masks: dict[int, np.ndarray] = {}
        for row in plan.rows if self.batches.masked else ():
            followed = row.request.user.followed
            if followed is not None and row.sample:
                assert followed.masks is not None, "a row whose mask is not ready has been planned"
                masks[row.row_id] = followed.masks
        return self.batches.masks(masks, self.programs.vocab_size)

    def _guilty(self, plan: StepPlan) -> list[Request]:
        """Returns the requests of a plan that cannot be converted to arrays even without other requests."""
        guilty = []
        for row in plan.rows:
            alone = StepPlan(plan.step, admitted=[request for request in plan.admitted if request is row.request])
            if isinstance(row, DecodeRow):
                alone.decode.append(row)
            else:
                alone.prefill.append(row)
            try:
                self._make_batches(alone)
            except Exception:
                log.exception("request %s cannot be turned into arrays", row.request.request_id)
                guilty.append(row.request)
        return guilty

    def _settle(self, step: DispatchedStep) -> None:
        begin = time.perf_counter()
        step.read(check_tags=self._checks_tags)
        read = time.perf_counter()
        self.stats.wait_seconds += read - begin
        if self.programs.compilations == step.compiled:
            # The device started this step when it was dispatched, or when the previous step ended.
            self.scheduler.observe(step.plan, read - max(step.begun, self._last_read))
        self._last_read = read
        self.stats.drafts.add(step.decode.drafted, step.decode.tokens)
        step.settle(self.scheduler)
        self.stats.not_finite += len(step.not_finite)
        self.stats.settle_seconds += time.perf_counter() - read

    def _forget(self) -> None:
        """Discards the donated store, which is lost. The next step starts with an empty store and computes running
        requests again."""
        self.stats.failures += 1
        self._failed_in_a_row += 1
        self._flight = None
        self._store = self._rows = None  # created again when needed: two stores may not fit in memory
        self.scheduler.reset()
