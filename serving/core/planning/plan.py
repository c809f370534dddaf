"""The plan of one step: the scheduler writes it, the engine turns it into arrays, and the result refers to it.

Rows keep what settling needs, because a result must be credited to the step that made it, not to whatever its row id
stands for by then.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from serving.core.config import SchedulerConfig
from serving.core.requests.request import PlannedRow, Request


@dataclass(slots=True, eq=False)
class DecodeRow(PlannedRow):
    """At most 1 + K tokens of one sequence with a prior state; `access` has room for them."""


@dataclass(slots=True, eq=False)
class PrefillRow(PlannedRow):
    """Part of a prompt: any number of tokens, all certain, cut into tiles at absolute multiples of `tile_size`.

    `access.writes` has a slot for each tile; the last one is where the sequence goes on from.
    """


Row = DecodeRow | PrefillRow


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step. The work of `admitted` runs first, then the decode and prefill programs in either order."""

    step: int
    decode: list[DecodeRow] = field(default_factory=list)
    prefill: list[PrefillRow] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    """Requests that have a row id from this step on: their sampling parameters must be written first."""
    preempted: list[Request] = field(default_factory=list)
    # -- the scheduler's own --
    effects: list[PlannedRow] = field(default_factory=list)
    """Rows with something to do once the step is dispatched."""

    @property
    def rows(self) -> list[Row]:
        """All of them, decode rows first."""
        return [*self.decode, *self.prefill]

    def remove(self, row: PlannedRow) -> None:
        """The row will not be run after all."""
        if isinstance(row, DecodeRow):
            self.decode.remove(row)
        elif isinstance(row, PrefillRow):
            self.prefill.remove(row)
        if row in self.effects:
            self.effects.remove(row)


@dataclass(slots=True, eq=False)
class StepResult:
    """The tokens that each row emitted, in the plan's order: accepted drafts, then the newly sampled one."""

    decode: Sequence[Sequence[int]] = ()
    prefill: Sequence[Sequence[int]] = ()
    drafted: Sequence[int] = ()
    """For the counters: drafts that each decode row really had, where that can be fewer than planned."""


@dataclass(slots=True, eq=False)
class RowResult:
    """The result of a settled step for one request."""

    request: Request
    row: Row
    tokens: Sequence[int]
    """Those that count: cut at a stop token and at the limits, so perhaps fewer than the row emitted."""


class Budget:
    """Tokens, tiles and prefill rows that a step still has room for while it is planned."""

    __slots__ = ("prefill_rows", "quotas", "share", "tiles", "tokens")

    def __init__(self, config: SchedulerConfig) -> None:
        self.tokens = config.max_num_batched_tokens
        self.tiles = config.tiles
        self.prefill_rows = config.max_prefill_rows
        self.share = min(config.tile_size, config.max_num_batched_tokens)
        self.quotas: dict[str | None, int] = {}
        """Prompt tokens that clients may still feed; empty with a single client."""

    @contextmanager
    def at_most(self, tokens: int) -> Iterator[None]:
        """Within, at most so many tokens can be used."""
        held = max(0, self.tokens - tokens)
        self.tokens -= held
        yield
        self.tokens += held

    @contextmanager
    def of(self, client: str | None) -> Iterator[None]:
        """Within, only the client's quota of prompt tokens can be used."""
        quota = self.quotas.get(client, 0) if self.quotas else self.tokens
        with self.at_most(quota):
            before = self.tokens
            yield
            if self.quotas:
                self.quotas[client] = quota - (before - self.tokens)

    def is_exhausted(self, client: str | None) -> bool:
        """Returns whether a client has used its quota."""
        return bool(self.quotas) and self.quotas.get(client, 0) <= 0

    def grant_share(self) -> None:
        """Reserves one tile of tokens for prefill even if decode rows took all tokens.

        So a step may feed that many more than its budget. Otherwise decoding rows that use the whole budget could
        hold up a prompt for as long as they run.
        """
        self.tokens = max(self.tokens, self.share)
