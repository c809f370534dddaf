"""Everything the scheduler knows: queues, cache, and the steps that have not settled."""

from collections import deque

from serving.core.cache.cache import Cache
from serving.core.cache.retention import RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.planning.fairness import Fairness
from serving.core.planning.plan import StepPlan
from serving.core.requests.drafts import DraftPolicy
from serving.core.requests.queues import Queues
from serving.core.requests.request import Fate, Progress, RemoteLoad, RemoteState, Request
from serving.core.stats import Stats
from serving.core.tiers.journal import Journal
from serving.core.tiers.prices import Prices
from serving.core.tiers.tiers import Tiers


class HostState:
    """What the parts of planning share."""

    def __init__(self, config: SchedulerConfig, policy: RetentionPolicy, drafts: DraftPolicy) -> None:
        self.config, self.policy, self.drafts = config, policy, drafts
        self.tiers: Tiers | None = None
        self.journal: Journal | None = None
        self.prices = Prices()
        """Where there are no tiers, which have theirs."""
        self.stats = Stats()
        self.queues = Queues(config.num_rows)
        self.fairness = Fairness(config)
        self.cache = Cache(config, policy, self.stats, self.queues.could_be_admitted)
        self.pending: StepPlan | None = None
        """Planned, or being planned, and not yet dispatched."""
        self.admits_until: int | None = None
        """The arrival after which requests are not admitted for now; None: all are."""
        self.unsettled: deque[StepPlan] = deque()
        """Dispatched, oldest first."""
        self.loads: list[RemoteLoad] = []
        """Begun since the engine last asked; from other workers."""
        self.fetches: list[RemoteLoad] = []
        """The same from the tiers."""
        self.unneeded_remotes: list[RemoteState] = []
        """No longer wanted by their requests, since the engine last asked."""

    def holds_back(self, request: Request) -> bool:
        """Whether a request came after those that may be admitted now."""
        return self.admits_until is not None and request.arrival > self.admits_until

    def reach(self, request: Request, end: int) -> int:
        """How many tokens must have a page for a step that feeds tokens up to `end`.

        The last token that a sequence can have is never fed: an optimistic length that reaches it needs no page for it.
        """
        return min(end + self.config.num_lookahead_tokens, request.max_total - 1)

    def return_surplus(self, request: Request) -> None:
        """Give back the pages beyond what the unsettled steps can reach."""
        progress = request.progress
        end = progress.num_computed
        for row in progress.unsettled:
            end += row.num_tokens
        progress.pages.return_surplus(self.reach(request, end))

    def undo(self, request: Request) -> None:
        """Make the row of the pending step as if it had never been planned; the request goes on running."""
        progress = request.progress
        row = progress.unsettled.pop()
        progress.num_sampling_steps -= row.sample
        progress.state.undo()
        progress.pages.undo()
        row.fate = Fate.DROPPED

    def release_all(self, request: Request, fate: Fate) -> None:
        """Free everything that a running request has, or one about to run. Its unsettled rows keep `fate`.

        Those rows may still run: nothing that they write is handed out before the next step is planned, and that one
        runs later.
        """
        progress = request.progress
        for row in progress.unsettled:
            row.fate = fate
        progress.state.release()
        progress.pages.release()
        if progress.row_id:
            self.queues.free_row_ids.append(progress.row_id)
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Make a request as if it had never run, but for its tokens."""
        request.progress = Progress(request, self.cache)
        request.queueing.retry_above, request.queueing.retry_at = -1, 0
        transfer = request.transfer
        if transfer.load is not None:
            self.let_go(transfer.load.remote)
            transfer.load = transfer.remote = None

    def let_go(self, remote: RemoteState) -> None:
        """Record that a request no longer needs a remote state, so that the worker that holds it can release it."""
        if remote.held is None:  # a tier holds nothing for single requests
            self.unneeded_remotes.append(remote)

    def check(self, *, idle: bool = False) -> None:
        """Raise `AssertionError` unless every slot, page and row id is accounted for; `idle`: and none is in use."""
        self.cache.check(idle=idle)
        if self.tiers is not None:
            self.tiers.check()
        self.queues.check()
