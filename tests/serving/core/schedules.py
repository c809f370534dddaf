"""One random schedule: settings, requests and moments drawn from a seed, run on the symbolic device to its end."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

from serving.core.cache.eviction_queue import ABSENT_SECONDS
from serving.core.cache.retention import Mark, merged
from serving.core.config import SchedulerConfig
from serving.core.errors import FinishReason, RequestError
from serving.core.planning.plan import Row, StepPlan, StepResult
from serving.core.requests.drafts import AdaptiveDrafts, DraftPolicy
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from tests.serving.core.symbolic import Device
from tests.serving.core.truth import Model, expect, expected_output


def random_config(rng: random.Random) -> SchedulerConfig:
    """Tiny sizes, so that every limit is met. One in three decodes by replay."""
    replaying = rng.random() < 1 / 3
    drafts = rng.choice([0, 0, 1, 2, 3, 5])
    rows = rng.choice([1, 2, 3, 4, 6])
    longest = rng.choice([rng.randrange(6, 16), rng.randrange(12, 36)])
    if replaying:
        drafts = min(drafts, 3)
        interval = 2 * (1 + drafts) + rng.choice([0, 0, 0, 1, 2, 4])
        tile = interval * rng.choice([1, 1, 2])
        block = tile * rng.choice([1, 1, 2])
        longest += 2 * interval
        slots = rng.choice([2, 3, 1 + rows, 2 + rows, 1 + 2 * rows, 40])
    else:
        interval = 1
        tile = rng.choice([1, 2, 2, 4])
        block = tile * rng.choice([1, 2, 2, 3, 4])
        drafts = min(drafts, block - 1)
        slots = rng.choice([2 + drafts, 3 + drafts, 1 + rows * (1 + drafts), 2 + rows * (2 + 2 * drafts), 40])
    page = rng.choice([size for size in (1, 2, 3, 4) if block % size == 0])
    fit = -(-(longest - 1) // page)
    pages = rng.choice([0, 1 + fit, 2 + fit, 2 + fit, 1 + fit + fit // 2, 1 + fit + fit // 2, 1 + 2 * fit, 200])
    members = (1, 1, 2, 3)[(longest + slots) % 4]
    return SchedulerConfig(
        num_slots=slots, num_pages=pages and members * (1 + -(-(pages - 1) // members)), context_members=members,
        max_num_seqs=rows, max_num_batched_tokens=rng.choice([1, 2, 3, 5, 8, 8, 16, 40]), max_model_len=longest,
        page_size=page, state_block_size=block, tile_size=tile,
        cache_mode=rng.choice(["none", "align", "all", "align", "all"]), num_speculative_tokens=drafts,
        replay_interval=interval, num_lookahead_tokens=rng.choice([0, drafts]), max_prefill_rows=rng.choice([1, 2, 4]),
        max_tiles=rng.choice([None, None, 1, 3]), max_waiting=rng.choice([None, None, None, 3]),
        max_decode_pause=1.0 if slots % 2 else None, chunks_end_at_blocks=longest % 4 == 0,
    )  # fmt: skip


class Run:
    """A schedule under way."""

    salts: Sequence[str | None] = (None, None, None, "salt")
    """Of requests."""

    def __init__(self, seed: int, *, scheduler: type[Scheduler] = Scheduler) -> None:
        self.rng = rng = random.Random(seed)
        self.config = random_config(rng)
        self.now, most = 0.0, self.config.num_speculative_tokens
        if seed % 11 == 7:
            drafts: DraftPolicy = AdaptiveDrafts(most, knee=rng.choice([1, 8, 100]))
        else:
            drafts = DraftPolicy(most)
            if rng.choice([False, True, True]):  # any number, too many and too few among them
                drafts.wanted = lambda request: rng.randrange(-1, most + 3)
        self.scheduler = scheduler(self.config, drafts=drafts, clock=lambda: self.now)
        self.device = Device(self.config, Model(rng.choice([2, 4, 9])), rng, rng.choice([0.0, 0.5, 0.8, 1.0]))
        self.trouble = rng.choice([0.0, 0.0, 0.03, 0.15])
        """How often something is aborted, withdrawn or lost."""
        self.waiting_results: list[tuple[StepPlan, StepResult]] = []
        self.proposals: dict[int, dict[Request, list[int]]] = {}
        """By step: the drafts in the seats of rows in lockstep after it. The host learns them when the step settles."""
        self.told: dict[Request, list[int]] = {}
        """The latest of them that have settled: what the host writes masks along."""
        self.requests: list[Request] = []
        self.seen: list[list[int]] = [[rng.randrange(self.device.model.vocab) for _ in range(30)] for _ in range(2)]
        """Token sequences that new prompts may begin like."""
        self.aborted: set[Request] = set()
        self.coverage: Counter[str] = Counter()
        self.clients = random.Random(seed) if seed % 3 == 1 else None
        """Says when an hour passes, if requests have clients; draws of its own."""
        self.blocks = random.Random(seed) if seed % 16 == 3 else None
        """Says when requests in lockstep are blocked; draws of its own, too."""
        self.changes = random.Random(seed) if seed % 4 == 2 else None
        """Says when the weights change; draws of its own leave all else of a schedule as it was."""

    # -- requests --

    def add_request(self) -> None:
        """A prompt that begins like an earlier one, most of the time."""
        rng, vocab = self.rng, self.device.model.vocab
        base = rng.choice(self.seen)
        prompt = base[: rng.randrange(0, len(base) + 1)]
        if rng.random() < 0.7:
            prompt = prompt + [rng.randrange(vocab) for _ in range(rng.randrange(0, 5))]
        if rng.random() < 0.97:
            room = self.config.max_model_len - 1
            prompt = prompt[: rng.choice([room, room, max(1, room // 2)])] or [1]
        salt = rng.choice(self.salts)
        first = self.make(prompt, salt, None)
        if first is not None and rng.random() < 0.15:
            for _ in range(rng.randrange(1, 3)):
                self.make(prompt, salt, first.request_id)

    def marks(self, length: int) -> dict[int, Mark]:
        """Marks of some requests; they take no random numbers of the schedule."""
        pick = random.Random(len(self.requests) * 1000 + length)
        count = pick.choice([0, 0, 1, 2, 9])
        positions = [pick.randrange(1, length + 1) for _ in range(count if length else 0)]
        return merged(Mark(position, pick.choice([None, 1e4])) for position in positions)

    def make(self, prompt: Sequence[int], salt: str | None, fork_of: str | None) -> Request | None:
        """Queue a request; None if it was refused."""
        rng = self.rng
        request = Request(
            f"r{len(self.requests)}",
            prompt,
            max_tokens=rng.choice([1, 2, 4, 8, 20, 20]),
            min_tokens=rng.choice([0, 0, 3]),
            eos_token_ids=[0],
            ignore_eos=rng.random() < 0.6,
            priority=rng.choice([0, 0, 0, 1, -1]),
            cache_salt=salt,
            prompt_logprobs=rng.random() < 0.05,
            lockstep=rng.random() < 0.1,
            fork_of=fork_of,
            client=[None, "a", "b"][len(self.requests) * 7 // 5 % 3] if self.clients is not None else None,
            marks=self.marks(len(prompt)),
        )
        try:
            self.scheduler.add(request)
        except RequestError as error:
            expect("\n" not in str(error), "a refusal is one line")
            self.coverage["refused"] += 1
            return None
        self.requests.append(request)
        return request

    def maybe_abort(self) -> None:
        """Perhaps aborts or stops a request."""
        if self.rng.random() < self.trouble and self.scheduler.queues.unfinished:
            request = self.rng.choice([r for r in self.requests if not r.finished])
            self.coverage[f"abort {request.status.name.lower()}"] += 1
            self.aborted.add(request)
            self.scheduler.finish(request.request_id, self.rng.choice([FinishReason.ABORT, FinishReason.STOP]))

    # -- steps --

    def settle(self) -> None:
        """The oldest result arrives."""
        plan, result = self.waiting_results.pop(0)
        self.told |= self.proposals.pop(plan.step)
        self.scheduler.observe(plan, plan.step % 5)
        lookahead, size = self.config.num_lookahead_tokens, self.config.page_size
        for emitted in self.scheduler.settle(plan, result):
            request = emitted.request
            expect(request not in self.aborted, "tokens for a request that is gone")
            if request.finished:
                self.seen.append(request.tokens)
            elif not emitted.row.is_prefill:
                progress = request.progress
                reach = progress.num_computed + sum(row.num_tokens for row in progress.unsettled) + lookahead
                expect(len(progress.pages.table) <= -(-reach // size), "surplus pages are kept", request)
                most = (1 + self.config.num_speculative_tokens) * (2 if progress.unsettled else 1)
                if self.config.replay_interval > 1:
                    most = 2 if progress.unsettled else 1
                expect(len(progress.state._own) <= most, "surplus slots are kept", request)
        self.device.check_index(self.scheduler)

    def step(self) -> bool:
        """Plan, dispatch, and perhaps settle; False if there was nothing to plan."""
        rng, scheduler = self.rng, self.scheduler
        if self.clients is not None and self.clients.random() < 0.05:
            self.now += ABSENT_SECONDS + 1
        while scheduler.needs_settle_before_schedule() or (self.waiting_results and rng.random() < 0.3):
            expect(not scheduler.needs_settle_before_schedule() or scheduler.schedule() is None, "planned too early")
            self.settle()
        self.maybe_abort()
        self._block()
        plan = scheduler.schedule()
        if plan is None and any(request.blocked for request in self.requests):
            for request in self.requests:
                request.blocked = False
            return True
        if plan is None:
            return False
        for row in plan.rows:
            expect(not row.request.blocked, "a blocked request has a row", row)
            before = row.request.progress.unsettled[:-1]
            expect(not row.request.lockstep or not any(other.sample for other in before), "planned too early", row)
            self._check_proposals(row)
        self._cover_sitting_out(plan)
        self.maybe_abort()
        if rng.random() < self.trouble:
            self.coverage["withdrawn"] += 1
            scheduler.withdraw(plan)
            scheduler.check()
            return True
        if rng.random() < self.trouble * 0.3:
            self.lose_store()
            return True
        if self.waiting_results and rng.random() < 0.3:
            # Allowed, though the loop settles after dispatch.
            self.settle()
        result = self.device.run(plan, scheduler)
        self.proposals[plan.step] = {
            row.request: list(self.device.rows[row.row_id].drafts) for row in plan.rows if row.request.lockstep
        }
        scheduler.dispatched(plan)
        self.waiting_results.append((plan, result))
        self.device.check_index(scheduler)
        if rng.random() < self.trouble * 0.3:
            self.lose_store()
            return True
        self.maybe_abort()
        if len(self.waiting_results) > 1:
            self.settle()
        scheduler.check()
        return True

    def _block(self) -> None:
        """The engine has begun to compute masks, or is done with some."""
        for request in self.requests if self.blocks is not None else ():
            if request.lockstep and not request.finished and not request.progress.unsettled:
                request.blocked = self.blocks.random() < 0.4
                self.coverage["blocked"] += request.blocked

    def _check_proposals(self, row: Row) -> None:
        """A row in lockstep must verify what the host knows of, however many steps it has sat out."""
        if row.request.lockstep and row.num_drafts:
            mine = self.device.rows[row.row_id].drafts
            expect(self.told.get(row.request) == mine, "masks are written along other drafts than are verified", row)
            self.coverage["drafts under masks"] += 1

    def _cover_sitting_out(self, plan: StepPlan) -> None:
        planned = {row.request for row in plan.rows}
        for request in self.scheduler.queues.running:
            waits = request.lockstep and any(row.sample for row in request.progress.unsettled)
            if waits and request not in planned and any(row.num_drafts for row in plan.decode):
                self.coverage["sitting out with drafts"] += 1

    def lose_store(self) -> None:
        """A step failed: the donated store is gone."""
        self.coverage["reset"] += 1
        self.device.wipe()
        self.scheduler.reset()
        self.scheduler.check()
        if self.waiting_results and self.rng.random() < 0.5:
            # What was read back of a lost step may be anything.
            plan, result = self.waiting_results[0]
            junk = StepResult([[7] * len(row) for row in result.decode], [[7] * len(row) for row in result.prefill])
            expect(not self.scheduler.settle(plan, junk), "tokens of a lost step")
        self.waiting_results.clear()

    def maybe_change_weights(self) -> None:
        """The trainer has made another model."""
        if self.changes is not None and self.changes.random() < 0.05 and self.device.weights < 3:
            while self.waiting_results:
                self.settle()
            self.scheduler.change_weights()
            self.device.change_weights()
            self.scheduler.check()
            self.device.check_index(self.scheduler)

    def run(self) -> None:
        """To the end, and then the accounts."""
        rng, scheduler = self.rng, self.scheduler
        total = rng.randrange(2, 12)
        for _ in range(rng.randrange(1, 4)):
            self.add_request()
        pace = rng.choice([0.1, 0.3, 0.9])
        attempts = 1
        for work in range(4000):
            if attempts < total and (rng.random() < pace or not scheduler.queues.unfinished):
                attempts += 1
                self.add_request()
            if not scheduler.queues.unfinished and not self.waiting_results and attempts >= total:
                break
            self.maybe_change_weights()
            if not self.step() and scheduler.queues.unfinished:
                expect(self.waiting_results, "nothing is planned, nothing is under way, requests are left")
                self.settle()
            elif not scheduler.queues.unfinished and self.waiting_results:
                self.settle()
            # Without trouble, each step advances at least one request by at least one token.
            again = (1 + 6 * (self.trouble > 0)) * (1 + self.device.weights)
            bound = 60 + 6 * sum(len(request.tokens) + 2 for request in self.requests) * again
            expect(work < bound, "starvation: too many steps", work)
        expect(not scheduler.queues.unfinished, "requests are left")
        scheduler.check(idle=True)
        self.device.check_index(scheduler)
        for request in self.requests:
            if request not in self.aborted:
                want = expected_output(self.device.truth(request), request)
                expect(request.output_token_ids == want, "output is not the greedy one", request, want)
            lookup = request.lookup
            expect(lookup.num_cached_tokens <= request.prompt_len, "more cached than there is")
            expect(not (request.prompt_logprobs and lookup.num_cached_tokens), "prompt log-probabilities and a hit")
            expect(not lookup.final or (lookup.miss_reason is None) == (lookup.num_cached_tokens > 0), "a reason")
        self._cover()

    def _cover(self) -> None:
        stats = self.scheduler.stats()
        self.coverage.update({name: count for name, count in stats.items() if isinstance(count, int)})
        self.coverage.update({f"miss {reason}": count for reason, count in stats["misses"].items()})


def run_seed(seed: int, kind: type[Run] = Run) -> Counter[str]:
    """One schedule; returns what it met. A failure names the seed."""
    try:
        run = kind(seed)
        run.run()
    except Exception as error:
        error.add_note(f"seed {seed}")
        raise
    return run.coverage


def run_seeds(run: Callable[[int], Counter[str]], seeds: Sequence[int], reached: Sequence[str] = ()) -> Counter[str]:
    """What the schedules, or traces, of these seeds meet together. All of `reached` must be in it."""
    assert seeds, "no seed to run"
    print("seeds", seeds[0], "to", seeds[-1])
    met: Counter[str] = Counter()
    for seed in seeds:
        met += run(seed)
    print(dict(sorted(met.items())))
    missing = [name for name in reached if not met[name]]
    assert not missing, f"never met: {missing}"
    return met
