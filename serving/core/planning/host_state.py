"""The scheduler's state on the host: queues, cache, and unsettled steps."""

from collections import deque

from serving.core.cache.cache import Cache
from serving.core.cache.retention import RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.planning.fairness import Fairness
from serving.core.planning.plan import StepPlan
from serving.core.requests.drafts import DraftPolicy
from serving.core.requests.queues import Queues
from serving.core.requests.request import Progress, RemoteLoad, RemoteState, Request, ResultDisposition
from serving.core.stats import Stats
from serving.core.tiers.journal import Journal
from serving.core.tiers.prices import Prices
from serving.core.tiers.tiers import Tiers


class HostState:
    """The state that all parts of planning share."""

    def __init__(self, config: SchedulerConfig, policy: RetentionPolicy, drafts: DraftPolicy) -> None:
        self.config, self.policy, self.drafts = config, policy, drafts
        self.tiers: Tiers | None = None
        self.journal: Journal | None = None
        self.prices = Prices()
        """Used without tiers. Tiers have their own."""
        self.stats = Stats()
        self.queues = Queues(config.num_rows)
        self.fairness = Fairness(config)
        self.cache = Cache(config, policy, self.stats, self.queues.could_be_admitted)
        self.pending: StepPlan | None = None
        """The step that is planned, or being planned, and not yet dispatched."""
        self.admits_until: int | None = None
        """Requests with a later arrival number are not admitted for now; None: all may be."""
        self.unsettled: deque[StepPlan] = deque()
        """Dispatched steps whose results have not been read, oldest first."""
        self.loads: list[RemoteLoad] = []
        """Loads started since the engine last took this list."""
        self.unneeded_remotes: list[RemoteState] = []
        """Remote states that requests stopped needing since the engine last took this list."""

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

    def forget(self, request: Request) -> None:
        """Resets a request to its state before it ran. Its tokens stay."""
        request.progress = Progress(request, self.cache)
        request.queueing.retry_above, request.queueing.retry_at = -1, 0
        if request.transfer.load is not None:
            self.drop_remote(request)

    def drop_remote(self, request: Request) -> None:
        """Records that a request no longer needs its remote state, so that the worker with the state can release it."""
        transfer = request.transfer
        if transfer.remote is not None and transfer.remote.held is None:  # a tier holds nothing for single requests
            self.unneeded_remotes.append(transfer.remote)
        transfer.remote = transfer.load = None

    def check(self, *, idle: bool = False) -> None:
        """Raises `AssertionError` unless every slot, page and row id has exactly one owner; with `idle`, none may be in
        use."""
        self.cache.check(idle=idle)
        if self.tiers is not None:
            self.tiers.check()
        self.queues.check()
