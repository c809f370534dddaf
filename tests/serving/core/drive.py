"""A small loop over the scheduler and the symbolic device, for tests that look at single plans."""

import random
import time
from collections.abc import Iterable, Sequence
from typing import Any, Self

from serving.core.cache.content import Scope
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import Checkpoint, Node
from serving.core.cache.retention import Clock
from serving.core.config import SchedulerConfig
from serving.core.errors import FinishReason
from serving.core.planning.plan import StepPlan, StepResult
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from tests.serving.core.symbolic import Device
from tests.serving.core.truth import Model, expected_output


def small_config(**changes: Any) -> SchedulerConfig:
    """Tile 2, pages of 2, B = 4; room for everything unless a test takes it away."""
    sizes: dict[str, Any] = {
        "num_slots": 60, "num_pages": 200, "max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64,
        "page_size": 2, "state_block_size": 4, "tile_size": 2, "cache_mode": "all",
    }  # fmt: skip
    return SchedulerConfig(**{**sizes, **changes})


class Loop:
    """Plans, runs and settles; keeps the plans since the last `run` began. `rightness`: probability of right drafts."""

    def __init__(self, *, rightness: float = 1.0, clock: Clock = time.monotonic, drafts=None, **changes: Any) -> None:
        self.config = small_config(**changes)
        self.scheduler = Scheduler(self.config, clock=clock, drafts=drafts)
        self.device = Device(self.config, Model(9), random.Random(1), rightness)
        self.plans: list[StepPlan] = []
        self.results: list[tuple[StepPlan, StepResult]] = []
        self.requests: list[Request] = []
        self.count = 0

    def add(self, prompt: Sequence[int], **options: Any) -> Request:
        """Queue a request."""
        self.count += 1
        request = Request(options.pop("request_id", f"r{self.count}"), prompt, **options)
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def steps(self, count: int) -> None:
        """So many of them."""
        for _ in range(count):
            self.step()

    def step(self) -> StepPlan | None:
        """One step, overlapped: the step before settles after this one is dispatched."""
        if self.scheduler.needs_settle_before_schedule():
            self.settle()
        plan = self.scheduler.schedule()
        if plan is not None:
            self.results.append((plan, self.device.run(plan, self.scheduler)))
            self.scheduler.dispatched(plan)
            self.plans.append(plan)
        if len(self.results) > 1 or (plan is None and self.results):
            self.settle()
        return plan

    def settle(self) -> None:
        """The oldest result arrives."""
        if self.results:
            self.scheduler.settle(*self.results.pop(0))
            self.scheduler.check()
            self.device.check_index(self.scheduler)

    def change_weights(self) -> None:
        """What is under way arrives, then the model is another."""
        while self.results:
            self.settle()
        self.scheduler.change_weights()
        self.device.change_weights()
        self.scheduler.check()

    def finish(self) -> None:
        """Until nothing is left; then the accounts, and that all outputs are the plain greedy ones."""
        for _ in range(2000):
            if not self.scheduler.queues.unfinished and not self.results:
                break
            under_way = len(self.results)
            if self.step() is None and not under_way:
                raise AssertionError("stuck")
        else:
            raise AssertionError("does not end")
        self.scheduler.check(idle=True)
        for request in self.requests:
            if request.finish_reason is not FinishReason.ABORT:
                assert request.output_token_ids == expected_output(self.device.truth(request), request)
        self.requests.clear()

    def run(self, prompt: Sequence[int], **options: Any) -> Request:
        """One request from beginning to end; `plans` are then its own."""
        self.plans.clear()
        request = self.add(prompt, **options)
        self.finish()
        return request

    def run_each(self, prompts: Iterable[Sequence[int]], **options: Any) -> Self:
        """One prompt after the other; outputs have one token unless told otherwise. Returns the loop."""
        for prompt in prompts:
            self.run(prompt, **{"max_tokens": 1, **options})
        return self

    def cached(self, prompt: Sequence[int], **options: Any) -> int:
        """Runs a request, with one token unless told otherwise. Returns how many prompt tokens were not computed."""
        return self.run(prompt, **{"max_tokens": 1, **options}).lookup.num_cached_tokens

    @property
    def index(self) -> PrefixIndex:
        """What the cache holds."""
        assert self.scheduler.index is not None
        return self.scheduler.index

    def entries(self, salt: str | None = None, weights: int | None = None) -> list[Checkpoint]:
        """The states of the index under a salt; those of the present weights unless told otherwise."""
        root = self.index.roots.get(Scope(salt, self.device.weights if weights is None else weights))
        nodes: list[Node] = [] if root is None else [root]
        for node in nodes:
            nodes += node.children.values()
        return [entry for node in nodes for entry in node.states.values()]

    def positions(self, salt: str | None = None, weights: int | None = None) -> list[int]:
        """Where the index has such states, ascending."""
        return sorted(entry.position for entry in self.entries(salt, weights))
