"""One sequence to complete: the request, its output, and the resources that it owns while it runs."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import IntEnum
from typing import Any

from serving.core.cache.cache import Cache
from serving.core.cache.content import Chain, Scope
from serving.core.cache.retention import Mark
from serving.core.cache.row_forms import RowReplay, RowSnapshots
from serving.core.cache.row_pages import Content, PageTable, RowPages
from serving.core.cache.row_state import RowState, StateAccess
from serving.core.errors import FinishReason, MissReason
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
    decoded_at: int = -1
    """The last step in which it decoded by turns with other rows of its client."""
    waits_since: int | None = None
    """The step at which it was first in turn and no row was free."""
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
    num_stateless_tokens: int = 0
    """Number of prompt tokens with cached pages beyond the cached state."""
    published: dict[int, Mark] = field(default_factory=dict)
    """The marks at which the request has published states, by position."""
    written_elsewhere: Mapping[float | None, int] = field(default_factory=dict)
    """Prompt tokens that another worker has added to its cache, by the `ttl` of their marks."""
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
    written_tokens: Mapping[float | None, int] = field(default_factory=dict)
    """Those that it has added to its cache, by the `ttl` of their marks."""
    held: TierHit | None = None
    """It comes from a tier of this worker, not from another worker."""
    scope: Scope | None = None
    """Only requests with this scope may use it. None for a state from a tier, which was found by its scope."""


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """The load that a running request waits for: one state, and the keys and values of the tokens [start, position)."""

    request: "Request"
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

    request: "Request"
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
    """A part of a prompt, or of tokens whose state a preemption discarded. It is published when it is dispatched. Any
    other row continues on the device, with the device's own length, state, last token and drafts."""
    step: int
    """Of the plan."""
    fate: ResultDisposition = field(kw_only=True, default=ResultDisposition.LIVE)

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed, as far as the host knows them: none of a row that continues on the device."""
        return self.request.tokens[self.length : self.end] if self.is_prefill else []

    @property
    def end(self) -> int:
        """Tokens committed after the step, if all that it feeds are kept."""
        return self.length + self.num_tokens


@dataclass(slots=True, eq=False)
class Progress:
    """The progress of a request, and its slots and pages while it runs. A preempted request gets a new one."""

    state: RowState
    pages: RowPages
    content: Content
    row_id: int = 0
    num_computed: int = 0
    """c as of the last settled step."""
    num_sampling_steps: int = 0
    """Number of steps that emit tokens since it got its row id. After the first, the device can continue by itself."""
    stops: list[int] = field(default_factory=list)
    """Positions at which a prefill chunk must end, ascending."""
    publish_at: int = 0
    """Number of tokens at which the next decoded page or state can be published."""
    unsettled: list[PlannedRow] = field(default_factory=list)
    """Its rows in steps that have been planned and not settled, oldest first."""
    set_up_due: bool = False
    """Whether its state has arrived and the device has not yet been told the owner of the row id."""

    @classmethod
    def begin(cls, request: "Request", cache: Cache) -> "Progress":
        """That of a request that does not run."""
        state = (RowReplay if cache.config.replay_interval > 1 else RowSnapshots)(cache, request.initial_slot)
        pages = RowPages(cache.pages, cache.config.page_size)
        scope, lookup = cache.scope(request.cache_salt, request.adapter), request.lookup
        if lookup.chain is None or lookup.chain.scope != scope:
            lookup.chain = Chain(scope, cache.config.state_block_size, request.client)
        return cls(state, pages, Content(request.tokens, lookup.chain, pages))

    @property
    def last_access(self) -> StateAccess | None:
        """The access of the last unsettled step."""
        return self.unsettled[-1].access if self.unsettled else None


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """A prompt, its limits and its output.

    The scheduler's records are in groups: `progress` while it runs, `lookup` in the cache, `transfer` from and
    to other workers, `queueing`.
    """

    request_id: str
    tokens: list[int]
    """Prompt and output. (The prompt is copied.)"""
    _: KW_ONLY
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: Collection[int] = ()
    """Those of `eos_token_ids` are added, unless `ignore_eos`."""
    eos_token_ids: InitVar[Iterable[int]] = ()
    ignore_eos: InitVar[bool] = False
    priority: int = 0
    """Smaller values are served first; equal ones in order of arrival."""
    cache_salt: str | None = None
    adapter: str | None = None
    """Digest of the adapter's content; None without an adapter."""
    marks: Mapping[int, Mark] = field(default_factory=dict)
    """Where states are worth keeping, by position in the prompt (`merged`)."""
    initial_slot: int = 0
    """The slot with the state before the first token, outside the pool of slots; 0 = zeros."""
    prompt_logprobs: bool = False
    """Computes every prompt token: the cache is not read (but is published to)."""
    lockstep: bool = False
    """The host must know the request's last tokens before its next step can be planned."""
    fork_of: str | None = None
    """The first of several requests for the same prompt (n > 1): the others wait for the end of its prompt instead of
    computing it again."""
    batch_id: str | None = None
    """Request id of the first of several prompts in one call: fair queueing treats them as one request."""
    client: str | None = None
    """The client that sent the request. Clients are served in turn and share stores; None counts as one client."""
    sampling: Any = None
    """For the engine; the scheduler does not read it."""
    user: Any = field(init=False, default=None)
    """Data that the engine attaches to the request."""

    # The result.
    status: Status = field(init=False, default=Status.WAITING)
    prompt_len: int = field(init=False)
    output_token_ids: list[int] = field(init=False, default_factory=list)
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    """The token (or, set by the engine, the string) that ended it."""

    # The scheduler's records.
    arrival: int = field(init=False, default=0)
    blocked: bool = field(init=False, default=False)
    """Set by the engine while it computes a value for the next step of a lockstep request. No step has a row of
    it until then."""
    max_total: int = field(init=False, default=0)
    """Maximum number of tokens of the sequence."""
    draft_acceptance: float | None = field(init=False, default=None)
    """For the draft policy: recent acceptance rate of drafts; None before the first draft."""
    queueing: Queueing = field(init=False, default_factory=Queueing)
    lookup: CacheLookup = field(init=False, default_factory=CacheLookup)
    transfer: Transfer = field(init=False, default_factory=Transfer)
    progress: Progress = field(init=False)
    """Set by the scheduler, and replaced when the request has to start again."""

    def __post_init__(self, eos_token_ids: Iterable[int], ignore_eos: bool) -> None:
        self.tokens = list(self.tokens)
        self.prompt_len = len(self.tokens)
        self.stop_token_ids = frozenset(self.stop_token_ids).union(() if ignore_eos else eos_token_ids)

    @property
    def flow(self) -> str:
        """The request id that all choices of all prompts of a call share."""
        return self.batch_id or self.fork_of or self.request_id

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
    def order(self) -> tuple[int, int]:
        """Order of running requests: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Order of a client's waiting requests: priority, turn, rank, then arrival."""
        return (self.priority, self.queueing.turn, self.queueing.rank, self.arrival)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name.lower()}, {len(self.tokens)} tokens)"
