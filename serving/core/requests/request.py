"""One sequence to complete: the request, its output, and the resources that it owns while it runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from serving.core.cache.cache import Cache
from serving.core.cache.content import Chain, Scope
from serving.core.cache.row_pages import Content, PageTable, RowPages
from serving.core.cache.row_replay import RowReplay
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.cache.row_state import RowState, StateAccess
from serving.core.reasons import FinishReason, MissReason
from serving.core.tiers.tiers import TierHit


class Status(IntEnum):
    """The status of a request."""

    WAITING = 0
    """Queued, or preempted; owns no slots or pages."""
    RUNNING = 1
    """Has a row id, slots and pages."""
    FINISHED = 2


class ResultDisposition(IntEnum):
    """What happens to a row's result after the step was planned."""

    LIVE = 0
    DETACHED = 1
    """The request was preempted: its tokens count, its state is lost."""
    DROPPED = 2
    """The request ended, or the store was lost: the result is ignored."""


class Request:
    """A prompt, its limits and its output.

    The scheduler's records are in groups: `progress` while it runs, `lookup` in the cache, `transfer` from and
    to other workers, `queueing`.

    `sampling` is for the engine; the scheduler does not read it. `fork_of` names the first of several requests for the
    same prompt (n > 1): the others wait for the end of its prompt instead of computing it again. `batch_id` is the
    request id of the first of several prompts in one call: fair queueing treats them as one request. `lockstep`: the
    host must know the request's last tokens before its next step can be planned.
    """

    __slots__ = (
        "adapter",
        "arrival",
        "batch_id",
        "blocked",
        "cache_salt",
        "client",
        "draft_acceptance",
        "draft_tokens",
        "finish_reason",
        "fork_of",
        "initial_slot",
        "lockstep",
        "lookup",
        "max_tokens",
        "max_total",
        "min_tokens",
        "output_token_ids",
        "priority",
        "progress",
        "prompt_len",
        "prompt_logprobs",
        "queueing",
        "request_id",
        "sampling",
        "status",
        "stop_reason",
        "stop_token_ids",
        "tokens",
        "transfer",
        "user",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int = 16,
        min_tokens: int = 0,
        stop_token_ids: Iterable[int] = (),
        eos_token_ids: Iterable[int] = (),
        ignore_eos: bool = False,
        priority: int = 0,
        cache_salt: str | None = None,
        adapter: str | None = None,
        initial_slot: int = 0,
        prompt_logprobs: bool = False,
        lockstep: bool = False,
        fork_of: str | None = None,
        batch_id: str | None = None,
        client: str | None = None,
        sampling: Any = None,
    ) -> None:
        # The request.
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
        """Prompt and output."""
        self.prompt_len = len(self.tokens)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
        self.priority = priority
        """Smaller values are served first; equal ones in order of arrival."""
        self.cache_salt = cache_salt
        self.adapter = adapter
        """Digest of the adapter's content; None without an adapter."""
        self.initial_slot = initial_slot
        """The slot with the state before the first token, outside the pool of slots; 0 = zeros."""
        self.prompt_logprobs = prompt_logprobs
        """Computes every prompt token: the cache is not read (but is published to)."""
        self.lockstep = lockstep
        self.fork_of = fork_of
        self.batch_id = batch_id
        self.client = client
        """The client that sent the request. Waiting clients are served in turn; None counts as one client."""
        self.sampling = sampling
        self.user: Any = None
        """Data that the engine attaches to the request."""

        # The result.
        self.status = Status.WAITING
        self.output_token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The token (or, set by the engine, the string) that ended it."""

        # The scheduler's records.
        self.arrival = 0
        self.blocked = False
        """Set by the engine while it computes a value for the next step of a lockstep request. No step has a row of
        it until then."""
        self.max_total = 0
        """Maximum number of tokens of the sequence."""
        self.draft_tokens: Sequence[int] | None = None
        """Drafts made on the host for the next step (a lockstep request only)."""
        self.draft_acceptance: float | None = None
        """For the draft policy: recent acceptance rate of drafts; None before the first draft."""
        self.queueing = Queueing()
        self.lookup = CacheLookup()
        self.transfer = Transfer()
        self.progress: Progress
        """Set by the scheduler, and replaced when the request has to start again."""

    @property
    def flow(self) -> str:
        """The request id that all choices of all prompts of a call share."""
        return self.batch_id or self.fork_of or self.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.tokens[: self.prompt_len]

    @property
    def finished(self) -> bool:
        """Whether it has ended, for any reason."""
        return self.status is Status.FINISHED

    @property
    def sits_out(self) -> bool:
        """Whether its next step needs values that the host does not know yet: its last tokens, or a mask made from
        them."""
        return self.lockstep and (self.blocked or any(row.sample for row in self.progress.unsettled))

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that were cached at the first admission."""
        return self.lookup.num_cached_tokens

    @property
    def miss_reason(self) -> MissReason | None:
        """The reason why no tokens were cached at the first admission."""
        return self.lookup.miss_reason

    @property
    def order(self) -> tuple[int, int]:
        """Order of running requests: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Order of a client's waiting requests: priority, turn, rank, then arrival."""
        return (self.priority, self.queueing.turn, self.queueing.rank, self.arrival)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name.lower()}, {len(self.tokens)} tokens)"


@dataclass(slots=True)
class Queueing:
    """The reason why a request waits, and its history in the queue."""

    prompt_done: bool = False
    """The prompt's last token has been dispatched at least once."""
    num_preemptions: int = 0
    turn: int = 0
    """Turn among the waiting requests of its client: equal for first choices, later for further choices."""
    rank: int = 0
    """Within a turn: -1 for those that were preempted, 0 for first choices, 1 for others."""
    last_turn: int = 0
    """Number of the choice within its request."""
    waits_since: int | None = None
    """The step at which it was first in turn and no row id was free."""
    num_displacements: int = 0
    """Number of times that it was displaced for another request."""
    retry_above: int = -1
    """Retry once more than this many pages are free."""
    retry_at: int = 0
    """Step at which to retry; earlier if a step has more room."""


@dataclass(slots=True)
class CacheLookup:
    """Cached tokens that a request reused at its first admission."""

    num_cached_tokens: int = 0
    """Number of cached prompt tokens."""
    miss_reason: MissReason | None = None
    """The reason for zero cached tokens."""
    final: bool = False
    """Makes the value final: the first admission has been dispatched."""
    chain: Chain | None = None
    """Names of the sequence's prefixes; None before it is queued."""


@dataclass(slots=True, eq=False)
class RemoteState:
    """Where to fetch S(position) of a request's tokens, with all keys and values up to there: from another worker, or
    from a tier below the device.
    """

    position: int
    """All prompt tokens (handoff `full`) or all but the last (`recompute-last`)."""
    source: Any = None
    """The engine's source of states that fetches it."""
    handle: Any = None
    """The source's key of it."""
    cached_tokens: int = 0
    """Prompt tokens that were cached at the other worker."""
    held: TierHit | None = None
    """It comes from a tier of this worker, not from another worker."""
    scope: Scope | None = None
    """Only requests with this scope may use it. None for a state from a tier, which was found by its scope."""


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """The load that a running request waits for: one state, and the keys and values of the tokens [start, position)."""

    request: Request
    remote: RemoteState
    start: int
    """A multiple of the page size: the pages up to here were found in the cache."""
    slot: int
    pages: Sequence[int]
    """Pages for the tokens from `start` on; empty if no page is missing, or without attention."""

    @property
    def position(self) -> int:
        """Tokens that the state has absorbed."""
        return self.remote.position

    @property
    def valid(self) -> bool:
        """Whether the request still waits for it. If not, another request may own its slot and pages."""
        return self.request.transfer.load is self


@dataclass(slots=True)
class Transfer:
    """A request's state that comes from another worker, or goes to one."""

    remote: RemoteState | None = None
    """The state of the prompt at another worker. None again after it has arrived or failed."""
    load: RemoteLoad | None = None
    """The load for which the request waits with a row id. No step has a row of it."""
    export: Any = None
    """For the engine: where to send the state at the prompt's end."""


@dataclass(slots=True, eq=False)
class PlannedRow:
    """A request's part in a decode or prefill step, from planning to settlement."""

    request: Request
    row_id: int
    length: int
    """c, tokens committed before the step; for a row that continues on the device, their maximum."""
    num_tokens: int
    """q, drafts included. 0 = sample from the slot's hidden state and feed nothing."""
    num_drafts: int
    access: StateAccess
    """The slots that the step reads and writes for the row."""
    pages: PageTable
    """The row's page table."""
    page_copy: tuple[int, int] | None
    """(source, target): a page that is copied before anything is written."""
    sample: bool
    """Whether the row emits tokens. If not, it feeds prompt tokens, and more follow."""
    is_prefill: bool
    """A part of a prompt, or of tokens whose state a preemption discarded. It is published when it is dispatched."""
    step: int
    """Of the plan."""
    fate: ResultDisposition = field(kw_only=True, default=ResultDisposition.LIVE)

    @property
    def certain(self) -> int:
        """Number of fed tokens that are kept for any sampled tokens."""
        return self.num_tokens - self.num_drafts

    @property
    def end(self) -> int:
        """Tokens committed after the step, if all that it feeds are kept."""
        return self.length + self.num_tokens


class Progress:
    """The progress of a request, and its slots and pages while it runs. A preempted request gets a new one."""

    __slots__ = (
        "content",
        "num_computed",
        "num_sampling_steps",
        "pages",
        "publish_at",
        "row_id",
        "set_up_due",
        "state",
        "stops",
        "unsettled",
    )

    def __init__(self, request: Request, cache: Cache) -> None:
        self.row_id = 0
        self.num_computed = 0
        """c as of the last settled step."""
        self.num_sampling_steps = 0
        """Number of steps that emit tokens since it got its row id. After the first, the device can continue by
        itself."""
        self.state: RowState = RowReplay(cache) if cache.config.replay_interval > 1 else RowSnapshots(cache)
        self.state.start_from(request.initial_slot)
        self.pages = RowPages(cache.pages, cache.config.page_size)
        scope, lookup = cache.scope(request.cache_salt, request.adapter), request.lookup
        if lookup.chain is None or lookup.chain.scope != scope:
            lookup.chain = Chain(scope, cache.config.state_block_size)
        self.content = Content(request.tokens, lookup.chain, self.pages)
        self.stops: list[int] = []
        """Positions at which a prefill chunk must end, ascending."""
        self.publish_at = 0
        """Number of tokens at which the next decoded page or state can be published."""
        self.unsettled: list[PlannedRow] = []
        """Its rows in steps that have been planned and not settled, oldest first."""
        self.set_up_due = False
        """Whether its state has arrived and the device has not yet been told the owner of the row id."""

    @property
    def last_access(self) -> StateAccess | None:
        """The access of the last unsettled step."""
        return self.unsettled[-1].access if self.unsettled else None
