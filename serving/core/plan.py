"""What one step does: the scheduler writes it, the engine turns it into arrays, the result comes back beside it.

Rows keep what settling needs (which slots may hold a boundary, what a publication would make findable), because a
result must be credited to the step that made it, not to whatever its seat holds by then.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from serving.core.request import Request


class Fate(IntEnum):
    """Whose a row's result is, once the step has been planned."""

    LIVE = 0
    DETACHED = 1
    """The request was preempted: the tokens count, the state is gone."""
    DROPPED = 2
    """The request ended, or the store was lost: the result means nothing."""


@dataclass(slots=True, eq=False)
class Mark:
    """A state that this step writes and that becomes findable once the step is dispatched."""

    position: int
    slot: int
    kind: int
    """A `prefix_index.Kind`."""


@dataclass(slots=True, eq=False)
class DecodeRow:
    """At most 1 + K tokens of one sequence with a prior state."""

    request: Request
    row_id: int
    continues: bool
    """The device's own length, read slot, last token and drafts are used; `tokens` is empty."""
    tokens: Sequence[int]
    """Tokens that the host knows: all certain ones, then the host's drafts if it has any."""
    length: int
    """c, tokens committed before the step; for a `continues` row the most that they can be."""
    read_slot: int
    num_tokens: int
    """q, drafts included. 0 = sample from the slot's hidden state and feed nothing."""
    num_drafts: int
    write_slots: Sequence[int]
    """Where the state after each token goes, `num_tokens` long; 0 = nowhere."""
    pages: list[int]
    """The row's page table."""
    page_copy: tuple[int, int] | None
    """(source, target): copied before anything is written."""
    sample: bool
    """Whether the row emits tokens; without it the tokens fed are prompt tokens and more of them follow."""
    # -- the scheduler's own --
    step: int = 0
    catching_up: bool = False
    """Part of a prompt, or of what a preemption threw away: its tokens are known, it is published once dispatched."""
    boundary_slots: Sequence[int] = ()
    """Those of `write_slots` in which a multiple of B may land: kept from the next step until this one settles."""
    marks: Sequence[Mark] = ()
    shared_page: int = -1
    """Index in `pages` of the page that `page_copy` replaced."""
    release_slot: int = 0
    """A published slot that the row stops reading once this step is dispatched."""
    fate: Fate = Fate.LIVE

    @property
    def certain(self) -> int:
        """Tokens fed that are kept whatever is sampled."""
        return self.num_tokens - self.num_drafts


@dataclass(slots=True, eq=False)
class PrefillRow:
    """Part of a prompt: any number of tokens, all certain, cut into tiles at absolute multiples of `tile_size`."""

    request: Request
    row_id: int
    start: int
    """c, tokens committed before the step; the tokens are `request.tokens[start : start + num_tokens]`."""
    num_tokens: int
    read_slot: int
    """0 = a fresh sequence: the state is zeros."""
    tile_write_slots: Sequence[int]
    """One per tile, 0 = nowhere. The last one is where the sequence goes on from."""
    pages: list[int]
    page_copy: tuple[int, int] | None
    sample: bool
    # -- the scheduler's own --
    step: int = 0
    marks: Sequence[Mark] = ()
    shared_page: int = -1
    release_slot: int = 0
    fate: Fate = Fate.LIVE

    catching_up = True
    num_drafts = 0
    boundary_slots = ()

    @property
    def length(self) -> int:
        """The same as `start`, under the decode rows' name."""
        return self.start

    @property
    def certain(self) -> int:
        """All of them."""
        return self.num_tokens

    @property
    def tokens(self) -> list[int]:
        """The tokens to feed."""
        return self.request.tokens[self.start : self.start + self.num_tokens]


Row = DecodeRow | PrefillRow


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step. The programs run in the order seats, then decode and prefill in either order."""

    step: int
    decode: list[DecodeRow] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    seats: list[Request] = field(default_factory=list)
    """Requests that took a seat in this step: their sampling parameters must be written first."""
    preempted: list[Request] = field(default_factory=list)
    # -- the scheduler's own --
    effects: list[Row] = field(default_factory=list)
    """Rows with something to do once the step is dispatched."""
    dispatched: bool = False

    @property
    def rows(self) -> list[Row]:
        """All of them, decode rows first."""
        return [*self.decode, *self.prefill]

    @property
    def num_tokens(self) -> int:
        """All tokens fed, drafts included."""
        return sum(row.num_tokens for row in self.rows)


@dataclass(slots=True, eq=False)
class StepResult:
    """The tokens that each row emitted, in the plan's order: accepted drafts, then the newly sampled one."""

    decode: Sequence[Sequence[int]] = ()
    prefill: Sequence[Sequence[int]] = ()
    drafted: Sequence[int] = ()
    """For the counters: drafts that each decode row really had, where that can be fewer than planned."""


@dataclass(slots=True, eq=False)
class Emitted:
    """What settling a step gave one request."""

    request: Request
    row: Row
    tokens: Sequence[int]
    """Those that count: cut at a stop token and at the limits, so perhaps fewer than the row emitted."""
