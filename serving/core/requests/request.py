"""One sequence to complete: what was asked, what came of it, and what it holds while it runs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from serving.core.cache.cache import Cache
from serving.core.cache.row_pages import Content, PageTable, RowPages
from serving.core.cache.row_replay import RowReplay
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.cache.row_state import RowState, StateAccess
from serving.core.reasons import FinishReason, MissReason
from serving.core.tiers.content import Chain
from serving.core.tiers.tiers import TierHit


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    """Queued, or preempted; holds nothing."""
    RUNNING = 1
    """Has a row id, slots and pages."""
    FINISHED = 2


class Fate(IntEnum):
    """Whose a row's result is, once the step has been planned."""

    LIVE = 0
    DETACHED = 1
    """The request was preempted: the tokens count, the state is gone."""
    DROPPED = 2
    """The request ended, or the store was lost: the result means nothing."""


class Request:
    """A prompt, its limits and its output.

    What else the scheduler knows stands in groups: `progress` while it runs, `lookup` in the cache, `transfer` from and
    to other workers, `queueing`.

    `sampling` is carried for the engine and never looked at. `fork_of` names the first of several requests for the
    same prompt (n > 1): the others wait for its prompt's end instead of computing it again. `batch_id` is the request
    id of the first of several prompts that came in one call: fair queueing treats them as one request. `lockstep` says
    that the host must know the request's last tokens before its next step can be planned.
    """

    __slots__ = (
        "arrival",
        "batch_id",
        "blocked",
        "cache_salt",
        "client",
        "draft_acceptance",
        "draft_tokens",
        "finish_reason",
        "fork_of",
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
        prompt_logprobs: bool = False,
        lockstep: bool = False,
        fork_of: str | None = None,
        batch_id: str | None = None,
        client: str | None = None,
        sampling: Any = None,
    ) -> None:
        # What was asked.
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
        """Prompt and output."""
        self.prompt_len = len(self.tokens)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = frozenset(stop_token_ids) | (frozenset() if ignore_eos else frozenset(eos_token_ids))
        self.priority = priority
        """Smaller is served first; equal ones in order of arrival."""
        self.cache_salt = cache_salt
        self.prompt_logprobs = prompt_logprobs
        """Computes every prompt token: the cache is not read (but is published to)."""
        self.lockstep = lockstep
        self.fork_of = fork_of
        self.batch_id = batch_id
        self.client = client
        """Whose request it is: waiting clients are served in turn. None is a client as any other."""
        self.sampling = sampling
        self.user: Any = None
        """Data that the engine attaches to the request."""

        # What became of it.
        self.status = Status.WAITING
        self.output_token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The token (or, set by the engine, the string) that ended it."""

        # What the scheduler knows of it.
        self.arrival = 0
        self.blocked = False
        """Set by the engine while it computes what the next step needs of a request in lockstep: no step has a row of
        it until then."""
        self.max_total = 0
        """The most tokens the sequence may come to have."""
        self.draft_tokens: Sequence[int] | None = None
        """Drafts made on the host for the next step (a lockstep request only)."""
        self.draft_acceptance: float | None = None
        """For the draft policy: how often a draft was right lately; None before the first."""
        self.queueing = Queueing()
        self.lookup = CacheLookup()
        self.transfer = Transfer()
        self.progress: Progress
        """Set by the scheduler; replaced whenever the request has to start over."""

    @property
    def flow(self) -> str:
        """The request id that all choices of all prompts of a call have in common."""
        return self.batch_id or self.fork_of or self.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.tokens[: self.prompt_len]

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is Status.FINISHED

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that did not have to be computed, as of the first admission."""
        return self.lookup.num_cached_tokens

    @property
    def miss_reason(self) -> MissReason | None:
        """Why there are none, as of the first admission."""
        return self.lookup.miss_reason

    @property
    def order(self) -> tuple[int, int]:
        """Which of the running ones comes first: priority, then arrival."""
        return (self.priority, self.arrival)

    @property
    def place(self) -> tuple[int, int, int, int]:
        """Which of a client's waiting ones comes first: by priority, turn, rank and arrival."""
        return (self.priority, self.queueing.turn, self.queueing.rank, self.arrival)

    def __repr__(self) -> str:
        return f"Request({self.request_id!r}, {self.status.name.lower()}, {len(self.tokens)} tokens)"


@dataclass(slots=True)
class Queueing:
    """Why a request waits, and what it has been through."""

    prompt_done: bool = False
    """The prompt's last token has been dispatched at least once."""
    num_preemptions: int = 0
    turn: int = 0
    """Among the waiting ones of its client: first choices of requests have the same, later choices later ones."""
    rank: int = 0
    """Within a turn: -1 for those that were preempted, 0 for first choices, 1 for others."""
    last_turn: int = 0
    """Of the choices of its request so far."""
    waits_since: int | None = None
    """The step in which it was found to be first in turn, without a row id for it."""
    num_displacements: int = 0
    """How often it has made room for another request."""
    retry_above: int = -1
    """Retry once more than this many pages are free."""
    retry_at: int = 0
    """Retry at this step, or as soon as there is more room in one."""


@dataclass(slots=True)
class CacheLookup:
    """What a request found in the cache at its first admission."""

    num_cached_tokens: int = 0
    """Prompt tokens that did not have to be computed."""
    miss_reason: MissReason | None = None
    """Why there are none."""
    final: bool = False
    """The first admission has been dispatched, so this stands."""
    chain: Chain | None = None
    """What the sequence's tokens are called in the tiers; None before anybody has looked there."""


@dataclass(slots=True, eq=False)
class RemoteState:
    """Where to fetch S(position) of a request's tokens, with all keys and values up to there: from another worker, or
    from a tier below the device.
    """

    position: int
    """All prompt tokens (handoff `full`) or all but the last (`recompute-last`)."""
    source: Any = None
    """For the engine: where to fetch it."""
    cached_tokens: int = 0
    """Prompt tokens that the other worker did not have to compute either."""
    held: TierHit | None = None
    """It comes from a tier of this worker's own, and not from another worker."""


@dataclass(slots=True, eq=False)
class RemoteLoad:
    """What a running request waits for: one state, and keys and values of the tokens [start, position)."""

    request: Request
    remote: RemoteState
    start: int
    """A multiple of the page size: the pages up to here were found in the cache."""
    slot: int
    pages: Sequence[int]
    """Where the tokens from `start` on go; empty where no page is missing, or there are none at all."""

    @property
    def position(self) -> int:
        """Tokens that the state has absorbed."""
        return self.remote.position

    @property
    def valid(self) -> bool:
        """Whether the request still waits for it. If not, another request may have its slot and pages."""
        return self.request.transfer.load is self


@dataclass(slots=True)
class Transfer:
    """A request's state that comes from another worker, or goes to one."""

    remote: RemoteState | None = None
    """Another worker has computed the prompt. None again once its state has arrived, or will not."""
    load: RemoteLoad | None = None
    """It has a row id and waits for the remote state: no step has a row of it."""
    export: Any = None
    """For the engine: where to send the state at the prompt's end."""


@dataclass(slots=True, eq=False)
class PlannedRow:
    """A request's part in a step, decode or prefill, from when it is planned until it has settled."""

    request: Request
    row_id: int
    length: int
    """c, tokens committed before the step; for a row that continues on the device the most that they can be."""
    num_tokens: int
    """q, drafts included. 0 = sample from the slot's hidden state and feed nothing."""
    num_drafts: int
    access: StateAccess
    """What the step reads and writes of the row's state."""
    pages: PageTable
    """The row's page table."""
    page_copy: tuple[int, int] | None
    """(source, target): copied before anything is written."""
    sample: bool
    """Whether the row emits tokens; without it the tokens fed are prompt tokens and more of them follow."""
    is_prefill: bool
    """Part of a prompt, or of what a preemption threw away: its tokens are known, it is published once dispatched."""
    step: int
    """Of the plan."""
    fate: Fate = field(kw_only=True, default=Fate.LIVE)

    @property
    def certain(self) -> int:
        """Tokens fed that are kept whatever is sampled."""
        return self.num_tokens - self.num_drafts

    @property
    def end(self) -> int:
        """Tokens committed after the step, if all that it feeds are kept."""
        return self.length + self.num_tokens


class Progress:
    """How far a request has come, and all that it holds while it runs. A request that is preempted gets a new one."""

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
        """c, exactly, as of the last settled step."""
        self.num_sampling_steps = 0
        """Steps since it took its row id that emit tokens: from the first on, the device can continue by itself."""
        self.state: RowState = RowReplay(cache) if cache.config.replay_interval > 1 else RowSnapshots(cache)
        self.pages = RowPages(cache.pages, cache.config.page_size)
        self.content = Content(request.tokens, cache.scope(request.cache_salt), self.pages)
        self.stops: list[int] = []
        """Positions at which a prefill chunk must end, ascending."""
        self.publish_at = 0
        """Not before it has so many tokens is there anything more to publish of what it decodes."""
        self.unsettled: list[PlannedRow] = []
        """Its rows in steps that have been planned and not settled, oldest first."""
        self.set_up_due = False
        """Its state has arrived, and no step has told the device yet whose the row id is."""

    @property
    def last_access(self) -> StateAccess | None:
        """The access of the last unsettled step."""
        return self.unsettled[-1].access if self.unsettled else None
