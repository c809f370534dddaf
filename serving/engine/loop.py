"""The step loop: schedule, dispatch, settle; the next step is dispatched before the last one is read."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from mamba_jax.batch import DecodeBatch, PrefillBatch, StepOutput
from mamba_jax.programs import Batch, RowsBatch, StepPrograms, abstract
from mamba_jax.rows import Rows
from mamba_jax.store import Store
from serving.core import DecodeRow, RemoteState, Request, Scheduler, StepPlan, StepResult
from serving.engine.batching import AnyBatch, BatchBuilder
from serving.engine.loop_stats import LoopStats
from serving.engine.results import Settled, StateError, not_finite, read_results, start_reading
from serving.engine.row_inputs import RowInputs
from serving.tiers.mover import Mover

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Steps that may fail one after the other before the loop gives up: a fault that is not going away."""


class PlanError(RuntimeError):
    """A plan could not be turned into arrays: a bug. It has been withdrawn, and nothing else is lost.

    `requests` are those whose rows cannot be: they must end, or no later plan can be either.
    """

    def __init__(self, message: str, requests: Sequence[Request]) -> None:
        super().__init__(message)
        self.requests = list(requests)


@dataclass(frozen=True)
class _Arrays:
    """A plan as the programs take it."""

    rows: Sequence[RowsBatch]
    """First, in this order."""
    decode: DecodeBatch | None
    prefill: PrefillBatch | None


@dataclass
class _Flight:
    """A step that has been dispatched, together with its own outputs: late results cannot meet another batch."""

    plan: StepPlan
    dispatched: float
    """When, by `perf_counter`."""
    compiled: int
    """Programs compiled by then."""
    decode: StepOutput | None
    prefill: StepOutput | None


class StateConnector(Protocol):
    """Exchanges states with other workers; called by the loop, on its thread."""

    @property
    def busy(self) -> bool:
        """Whether it has something to do though no request has."""
        ...

    def find(self, prompt: Sequence[int]) -> RemoteState | None:
        """The state of a prompt that another worker has computed, if this one knows of it."""
        ...

    def exchange(self, loop: StepLoop) -> None:
        """Before a step is planned, and once more after: may take what has arrived into the store."""
        ...

    def dispatched(self, loop: StepLoop, plan: StepPlan) -> None:
        """A step is in the device's queue; nothing that it wrote is in anybody else's hands yet."""
        ...


class Followers(Protocol):
    """The other hosts of an engine's mesh, which dispatch whatever this one does: see `serving/hosts`."""

    def call(self, batch: Batch) -> None:
        """Have all of them dispatch this batch's program after those that they were told of before."""
        ...

    def step_failed(self, error: BaseException) -> None:
        """This host has lost its store, and theirs say nothing without it: does not return."""
        ...

    def done(self) -> None:
        """No step will follow."""
        ...


class WarmUpStopped(RuntimeError):
    """Not everything has been compiled, because `StepLoop.leaving` was set."""


class StepLoop:
    """Runs the scheduler's plans on the device.

    Args:
        scheduler: decides what each step does.
        programs: the compiled steps.
        batches: plans to arrays.
        inputs: requests to arrays.
        make_store, make_rows: an empty store and empty seats; called at start and after a step has failed.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        programs: StepPrograms,
        batches: BatchBuilder,
        inputs: RowInputs,
        *,
        make_store: Callable[[], Store],
        make_rows: Callable[[], Rows],
    ) -> None:
        self.scheduler, self.programs, self.batches, self.inputs = scheduler, programs, batches, inputs
        self.stats = LoopStats()
        self.fault: Callable[[StepPlan], None] | None = None
        """For tests: called after a step's programs have been dispatched; may raise as a failing device would."""
        self.connector: StateConnector | None = None
        """For the split of prefill and decode over workers; see `connect`."""
        self.mover: Mover | None = None
        """Moves checkpoints between the store and the tiers below the device, if there are any."""
        self.followers: Followers | None = None
        """Set on the host that leads others."""
        self._make_store, self._make_rows = make_store, make_rows
        self._store: Store | None = make_store()
        self._rows: Rows | None = make_rows()
        self._checks_tags = self._store.tags is not None
        self._flight: _Flight | None = None
        self._settling = False
        self._failed_in_a_row = self._unplanned_in_a_row = 0
        self._last_read = 0.0
        self.leaving = threading.Event()
        """Set by any thread when nothing more is wanted: ends a warm-up, which takes minutes."""

    def connect(self, connector: StateConnector) -> None:
        """Have a connector exchange states from the next step on. It needs a running loop, so it is made after it."""
        self.connector = connector

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        if self._flight is not None or self.scheduler.has_unfinished:
            return True
        return self.connector is not None and self.connector.busy

    @property
    def in_flight(self) -> bool:
        """Whether a step has been dispatched and not yet settled."""
        return self._flight is not None or self._settling

    @property
    def store(self) -> Store | None:
        """The store as it is now; the next step takes it. None after a failure, until the next step."""
        return self._store

    def close(self) -> None:
        """When no step will follow: what the device holds goes to the disk tier, if there is one."""
        if self.mover is not None:
            self.mover.close(self)
        if self.followers is not None:
            self.followers.done()

    def run(self, batch: Batch) -> StepOutput | None:
        """Dispatch one program over the store and the seats: all that a step does goes through here.

        None: a batch that changes the seats alone, which gives nothing to read.
        """
        self.take_store()
        assert self._store is not None
        assert self._rows is not None
        if self.followers is not None:
            self.followers.call(batch)
        if isinstance(batch, RowsBatch):
            self._rows = self.programs.change_rows(self._rows, batch)
            return None
        run = self.programs.decode if isinstance(batch, DecodeBatch) else self.programs.prefill
        self._store, self._rows, output = run(self._store, self._rows, batch)  # type: ignore[arg-type]
        return output

    def replace_store(self, change: Callable[[Store], Store]) -> None:
        """Dispatch a program over the store that no step knows of. If it raises, the store counts as lost."""
        assert self.followers is None, "other hosts would not do the same"
        self.take_store()
        assert self._store is not None
        store, self._store = self._store, None
        self._store = change(store)

    def free_store(self) -> None:
        """Give the memory of states and pages back. Nothing may be in flight; what runs will be computed again.

        The next step, or `take_store`, takes it anew.
        """
        assert not self.in_flight, "a step in flight needs the store"
        assert self.followers is None, "other hosts would not do the same"
        for leaf in jax.tree.leaves((self._store, self._rows)):
            leaf.delete()
        self._store = self._rows = None
        self.scheduler.reset()

    def take_store(self) -> None:
        """Make an empty store now, if there is none."""
        if self._store is None or self._rows is None:
            self._store, self._rows = self._make_store(), self._make_rows()
            self.batches.forget_page_tables()

    @property
    def shapes(self) -> tuple[Store, Rows]:
        """What steps run on, as a compiler sees it: the arrays themselves go from step to step. Needs a store."""
        assert self._store is not None
        return abstract(self._store), abstract(self._rows)

    def warm_up(self, batches: Iterable[AnyBatch], progress: Callable[[], None] | None = None) -> None:
        """Compile the programs for batches of these shapes.

        Raises:
            WarmUpStopped: `leaving` has been set.
        """
        store, rows = self._store, self._rows
        assert store is not None
        assert rows is not None
        # Tracing takes turns, but XLA compiles outside Python's lock: two programs at a time keep two cores busy.
        workers = min(4, os.cpu_count() or 1)
        with ThreadPoolExecutor(workers) as pool:
            jobs = [pool.submit(self.programs.program, store, rows, batch) for batch in batches]
            try:
                for job in as_completed(jobs):
                    job.result()
                    if self.leaving.is_set():
                        raise WarmUpStopped("asked to stop while compiling")
                    if progress is not None:
                        progress()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise

    def step(self) -> Settled | None:
        """Dispatch the next step, then settle the one before it. None: nothing has been settled.

        Raises:
            PlanError: a plan could not be turned into arrays; whatever else was under way goes on.
            Exception: steps keep failing, or a bug or an interrupt came between: nothing is under way any more, and all
                requests are queued to be computed again.
        """
        return self._turn(self._plan)

    def drain(self) -> Settled | None:
        """Settle the step that is in flight, if there is one, and dispatch none. Raises what `step` does."""
        return self._turn(lambda: None)

    def _turn(self, make_plan: Callable[[], StepPlan | None]) -> Settled | None:
        before, self._flight = self._flight, None
        self._settling = before is not None
        try:
            self._exchange()
            plan = make_plan()
            if plan is not None:
                self._flight = self._dispatch(plan)
            self._exchange()
            self._settling = False
            settled = None if before is None else self._settle(before)
            self._failed_in_a_row = 0 if settled else self._failed_in_a_row
            return settled
        except PlanError:
            self._flight = before  # it is still running, and whole
            raise
        except BaseException as error:
            self._forget()
            if self.followers is not None:
                self.followers.step_failed(error)
            if not self._is_transient(error):
                raise
            text = " ".join(str(error).split())[:500]
            log.warning("a step failed; everything that ran is computed again: %s", text)
            return None

    def _exchange(self) -> None:
        """Take in what has come from elsewhere, and begin what is newly waited for."""
        if self.connector is not None:
            self.connector.exchange(self)
        if self.mover is not None:
            self.mover.exchange(self)

    def _plan(self) -> StepPlan | None:
        begin = time.perf_counter()
        self.inputs.collect_masks()
        lockstep = self.scheduler.needs_settle_before_schedule()
        self.stats.lockstep_steps += lockstep
        plan = None if lockstep else self.scheduler.schedule()
        if plan is None and not self._settling and self.inputs.collect_masks(idle=True):
            plan = self.scheduler.schedule()
        if self.mover is not None:
            # What was evicted for this plan is still where it was, until the plan or an arrival is dispatched.
            self.mover.copy_out(self._store)
        self.stats.plan_seconds += time.perf_counter() - begin
        return plan

    def _dispatch(self, plan: StepPlan) -> _Flight:
        begin, compiled = time.perf_counter(), self.programs.compilations
        try:
            arrays = self._arrays(plan)
        except Exception as error:
            guilty = self._guilty(plan)
            # Nothing has happened on the device: nothing of this plan may become findable.
            self.scheduler.withdraw(plan)
            self.batches.forget_page_tables()
            self._unplanned_in_a_row += 1
            if not guilty and self._unplanned_in_a_row >= MAX_FAILURES:
                guilty = [row.request for row in plan.rows]  # the batch fails, but no single row does
            raise PlanError(f"step {plan.step} could not be turned into arrays: {error}", guilty) from error
        self._unplanned_in_a_row = 0
        built = time.perf_counter()
        decode = prefill = None
        for batch in arrays.rows:
            self.run(batch)
        if arrays.decode is not None:
            decode = self.run(arrays.decode)
            start_reading(decode, plan.decode)
            self.stats.decode_rows += len(plan.decode)
        if arrays.prefill is not None:
            prefill = self.run(arrays.prefill)
            start_reading(prefill, plan.prefill)
            self.stats.prefill_tokens += sum(row.num_tokens for row in plan.prefill)
        if self.fault is not None:
            self.fault(plan)
        done = time.perf_counter()
        self.scheduler.dispatched(plan)
        if self.connector is not None:
            self.connector.dispatched(self, plan)
        self.stats.steps += 1
        self.stats.dispatch_seconds += done - built
        self.stats.plan_seconds += built - begin + time.perf_counter() - done
        return _Flight(plan, begin, compiled, decode, prefill)

    def _arrays(self, plan: StepPlan) -> _Arrays:
        seats = [self.inputs.seat(request) for request in plan.admitted]
        decode = self.batches.decode(plan.decode) if plan.decode else None
        prefill = self.batches.prefill(plan.prefill) if plan.prefill else None
        tables = self.batches.take_page_tables()
        return _Arrays([*seats, *tables, *self.inputs.masks(plan)], decode, prefill)

    def _guilty(self, plan: StepPlan) -> list[Request]:
        """The requests of a plan that cannot be turned into arrays even alone."""
        guilty = []
        for row in plan.rows:
            alone = StepPlan(plan.step, admitted=[request for request in plan.admitted if request is row.request])
            if isinstance(row, DecodeRow):
                alone.decode.append(row)
            else:
                alone.prefill.append(row)
            try:
                self._arrays(alone)
            except Exception:
                log.exception("request %s cannot be turned into arrays", row.request.request_id)
                guilty.append(row.request)
        return guilty

    def _settle(self, flight: _Flight) -> Settled:
        plan = flight.plan
        begin = time.perf_counter()
        decode = read_results(flight.decode, plan.decode, check_tags=self._checks_tags)
        prefill = read_results(flight.prefill, plan.prefill, check_tags=self._checks_tags)
        self.inputs.take_proposals(plan.decode, decode)
        self.inputs.take_proposals(plan.prefill, prefill)
        read = time.perf_counter()
        self.stats.wait_seconds += read - begin
        if self.programs.compilations == flight.compiled:
            # The device began with it when it was dispatched, or when it was done with the step before.
            self.scheduler.observe(plan, read - max(flight.dispatched, self._last_read))
        self._last_read = read
        if decode is not None and decode.drafted:
            self.stats.drafts.add(decode.drafted, decode.tokens)
        broken = [*not_finite(decode, plan.decode), *not_finite(prefill, plan.prefill)]
        for request in broken:
            self.stats.not_finite += 1
            self.scheduler.discard(request.request_id)
        result = StepResult(
            decode=decode.emitted(len(plan.decode)) if decode else [],
            prefill=prefill.emitted(len(plan.prefill)) if prefill else [],
            drafted=decode.drafted if decode else [],
        )
        settled = Settled(self.scheduler.settle(plan, result), plan, decode, prefill, broken)
        if prefill is not None and prefill.prompt is not None:
            starts = np.cumsum([0] + [row.num_tokens for row in plan.prefill])
            settled.prompt_starts = starts.tolist()
        self.stats.settle_seconds += time.perf_counter() - read
        return settled

    def _forget(self) -> None:
        """The donated store is lost. The next step starts from an empty one and computes again what was running."""
        self.stats.failures += 1
        self._failed_in_a_row += 1
        self._flight = None
        self._store = self._rows = None  # made again when needed: two stores at once may not fit
        self.scheduler.reset()

    def _is_transient(self, error: BaseException) -> bool:
        """Whether to try again. XLA raises RuntimeErrors; bugs and interrupts will not pass, nor what persists."""
        if isinstance(error, (RuntimeError, MemoryError)) and not isinstance(error, StateError):
            return self._failed_in_a_row < MAX_FAILURES
        return False
