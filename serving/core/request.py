"""One sequence to complete, and the state it owns while it runs."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from serving.core.reasons import FinishReason, MissReason

if TYPE_CHECKING:
    from serving.core.plan import Row
    from serving.core.prefix_index import Node
    from serving.core.remote import Load, RemoteState


class Status(IntEnum):
    """Where a request is in its life."""

    WAITING = 0
    """Queued, or preempted; holds nothing."""
    RUNNING = 1
    """Has a seat, slots and pages."""
    FINISHED = 2


class RowState:
    """The slots of one running sequence. The only owner of them: nothing else may free or publish one.

    Today a state is a whole slot. `own` are slots that only this row writes: with K drafts 1 + K of them, and a
    second set while an unsettled step may contain a multiple of B. `held` is a published slot that the row's next
    step reads and never writes. `current` is where S(num_computed) lies as of the last settled step; a step that
    continues on the device does not look at it.
    """

    __slots__ = ("current", "held", "own")

    def __init__(self) -> None:
        self.own: list[int] = []
        self.held = 0
        self.current = 0


class Request:
    """A prompt, its limits, and everything the scheduler knows about it.

    `sampling` is carried for the engine and never looked at. `fork_of` names the first of several requests for the
    same prompt (n > 1): the others wait for its prompt's end instead of computing it again. `lockstep` says that the
    host must know the request's last tokens before its next step can be planned.
    """

    __slots__ = (
        "arrival",
        "cache_salt",
        "counted",
        "draft_acceptance",
        "draft_tokens",
        "export",
        "finish_reason",
        "flights",
        "fork_of",
        "load",
        "lockstep",
        "max_tokens",
        "max_total",
        "min_tokens",
        "miss_reason",
        "node",
        "num_cached_tokens",
        "num_computed",
        "num_preemptions",
        "num_published",
        "num_sampling_steps",
        "output_token_ids",
        "pages",
        "priority",
        "prompt_done",
        "prompt_len",
        "prompt_logprobs",
        "remote",
        "request_id",
        "retry_above",
        "retry_at",
        "row_id",
        "sampling",
        "seat_due",
        "shared_page",
        "state",
        "status",
        "stop_reason",
        "stop_token_ids",
        "stops",
        "tokens",
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
        sampling: Any = None,
    ) -> None:
        self.request_id = request_id
        self.tokens = list(prompt_token_ids)
        """Prompt and output."""
        self.prompt_len = len(self.tokens)
        self.output_token_ids: list[int] = []
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
        self.sampling = sampling
        self.user: Any = None
        """For the engine: whatever it keeps beside the request."""
        self.draft_tokens: Sequence[int] | None = None
        """For the engine: drafts made on the host for the next step (a lockstep request only)."""
        self.draft_acceptance: float | None = None
        """For the draft policy: how often a draft was right lately; None before the first."""
        self.remote: RemoteState | None = None
        """Another worker has computed the prompt; see `remote`. None again once it has arrived, or will not."""
        self.export: Any = None
        """For the engine: whom to give the state at the prompt's end."""

        self.status = Status.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        """The token (or, set by the engine, the string) that ended it."""
        self.num_cached_tokens = 0
        """Prompt tokens that did not have to be computed, as of the first admission."""
        self.miss_reason: MissReason | None = None
        self.counted = False
        """Its first admission has been dispatched, so `num_cached_tokens` and `miss_reason` stand."""
        self.num_preemptions = 0
        self.arrival = 0
        self.max_total = 0
        """The most tokens the sequence may come to have."""
        self.prompt_done = False
        """The prompt's last token has been dispatched at least once."""
        self.retry_above = -1
        """Blocked for want of pages: not looked at again before more than this many are to be had."""
        self.retry_at = 0
        """Blocked for want of room in the step: not looked at again before this step unless there is more room."""

        # While it runs:
        self.row_id = 0
        self.num_computed = 0
        """c, exactly, as of the last settled step."""
        self.num_sampling_steps = 0
        """Steps since it took its seat that emit tokens: from the first on, the device can continue by itself."""
        self.state = RowState()
        self.pages: list[int] = []
        self.shared_page = -1
        """Index in `pages` of a partly filled page that others may read too: copied before it is written."""
        self.num_published = 0
        """Full pages, counted from the front, that the index has."""
        self.node: Node | None = None
        """The index's node of the last published page."""
        self.stops: list[int] = []
        """Positions at which a prefill chunk must end, ascending."""
        self.flights: list[Row] = []
        """Its rows in steps that have not settled, oldest first."""
        self.load: Load | None = None
        """It has its seat and waits for a remote state: no step has a row of it."""
        self.seat_due = False
        """Its state has arrived, and no step has told the device yet who sits there."""

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt (a copy)."""
        return self.tokens[: self.prompt_len]

    @property
    def finished(self) -> bool:
        """Whether it has ended, for whatever reason."""
        return self.status is Status.FINISHED

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: priority, then arrival."""
        return (self.priority, self.arrival)

    def __repr__(self) -> str:
        status = self.status.name.lower()
        return f"Request({self.request_id!r}, {status}, {len(self.tokens)} tokens, c={self.num_computed})"
