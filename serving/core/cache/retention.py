"""Decides which states to publish and which to evict first: also the states that clients mark.

Only `RetentionPolicy` makes these decisions, so that another policy can replace it without other changes.
`benchmarks/RESULTS.md` has the reuse that this policy achieved with recorded traffic.
"""

import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from serving.core.cache.prefix_tree import Checkpoint, CheckpointKind
from serving.core.config import SchedulerConfig
from serving.core.errors import RequestError

LONGEST_TTL = 86_400.0
"""Maximum time of a mark in seconds."""
MAX_MARKS = 8
"""Maximum number of marks of a request; the deepest ones are kept."""

_WHOLE = 1 << 40
"""The share that all kept states have together, at most."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A position of a prompt from which its client will continue again. Prefill ends a tile there and publishes the
    state, because a recurrent state cannot be cut back."""

    position: int = 0
    """Number of prompt tokens before it; required, at least 1."""
    ttl: float | None = None
    """Seconds for which the state is evicted after all others, from its last use by a request with this mark. None:
    like the end of a prompt."""

    def __post_init__(self) -> None:
        ttl = self.ttl
        timed = isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= LONGEST_TTL
        if type(self.position) is not int or self.position < 1 or not (timed or ttl is None):
            raise RequestError(
                "a mark has a position (tokens, at least 1), and None or a ttl (seconds above 0 and up to "
                f"{LONGEST_TTL:g}), got {reprlib.repr(self.position)} and {reprlib.repr(ttl)}"
            )


def merged(marks: Iterable[Mark]) -> dict[int, Mark]:
    """Returns the deepest marks by position, at most `MAX_MARKS`; of several at one position that with the longest
    time."""
    found = {mark.position: mark for mark in sorted(marks, key=lambda mark: (mark.position, mark.ttl or 0.0))}
    return dict(list(found.items())[-MAX_MARKS:])


def written_tokens(marks: Mapping[int, Mark], num_cached_tokens: int) -> dict[float | None, int]:
    """Returns the numbers of prompt tokens that a request has added to those that were cached, by the `ttl` of the
    marks whose states it has published."""
    found: dict[float | None, int] = {}
    before = num_cached_tokens
    for position in sorted(marks):
        if position > before:
            ttl = marks[position].ttl
            found[ttl] = found.get(ttl, 0) + position - before
            before = position
    return found


class KeptStates:
    """The states that marks keep, each until its time has passed. No client takes the share of another.

    Args:
        most: maximum number of states.
        most_tokens: maximum number of tokens before all of them, whose pages they need. At the limit, the client that
            keeps most loses the state marked longest ago.
        clock: returns seconds.
    """

    def __init__(self, most: int, most_tokens: float, clock: Clock = time.monotonic) -> None:
        self._most, self._most_tokens, self.clock = most, most_tokens, clock
        self._clients: dict[Checkpoint, str | None] = {}
        self._states: dict[str | None, dict[Checkpoint, int]] = {}
        """The states of each client and their numbers, the one marked longest ago first."""
        self._shares: Counter[str | None] = Counter()
        """Of each client, as integers: their sums are exact."""
        self._total = self._marked = 0
        self._first_end = math.inf

    def keep(self, entry: Checkpoint, seconds: float, client: str | None) -> list[Checkpoint]:
        """Keeps a state for a time. Returns the states that are not kept any more."""
        until = max(self.clock() + seconds, entry.kept_until)
        self.forget(entry)
        share = self._share(entry)
        if share > _WHOLE:
            return [entry]
        entry.kept_until = until
        self._first_end = min(self._first_end, until)
        self._marked += 1
        self._clients[entry] = client
        self._states.setdefault(client, {})[entry] = self._marked
        self._shares[client] += share
        self._total += share
        over = []
        while self._total > _WHOLE:
            largest = max(self._states, key=lambda each: (self._shares[each], -next(iter(self._states[each].values()))))
            over.append(next(iter(self._states[largest])))
            self.forget(over[-1])
        return over

    def _share(self, entry: Checkpoint) -> int:
        if not self._most or entry.position > self._most_tokens:
            return _WHOLE + 1
        return int(max(1 / self._most, entry.position / self._most_tokens) * _WHOLE)

    def ended(self) -> list[Checkpoint]:
        """Returns the states whose time has passed since the last call. They are not kept any more."""
        if not self._clients or (now := self.clock()) < self._first_end:
            return []
        found = [entry for entry in self._clients if entry.kept_until <= now]
        for entry in found:
            self.forget(entry)
        self._first_end = min((entry.kept_until for entry in self._clients), default=math.inf)
        return found

    def forget(self, entry: Checkpoint) -> bool:
        """Ends the time of a state, if it is kept. Returns whether it was."""
        entry.kept_until = 0.0
        if entry not in self._clients:
            return False
        client, share = self._clients.pop(entry), self._share(entry)
        del self._states[client][entry]
        self._shares[client] -= share
        self._total -= share
        if not self._states[client]:
            del self._states[client], self._shares[client]
        return True


class EvictionRank(IntEnum):
    """The order of eviction. Within one rank, worth decides."""

    STALE = -1
    """Computed with weights that have since been replaced: no request will match it."""
    INTERIOR = 0
    """A boundary with exactly one state below it: no prefix branches off here, so its loss costs the least."""
    SUPERSEDED = 1
    """The end of a prompt or a mark with exactly one state below it: the conversation has continued past it."""
    VALUABLE = 2
    """The deepest states of their chains, branching points, and prompts that requests repeat."""
    KEPT = 3
    """States that marks keep, until their time has passed."""


_MOST_HITS = 3
"""Maximum number of hits that count. Without it, a state that was popular once would stay cached long after its last
hit."""


class RetentionPolicy:
    """Publishes states at multiples of B, junctions, marks and prompt ends; evicts by `rank`, then by `worth`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.mode = config.cache_mode
        self.block = config.state_block_size
        self.page = config.page_size
        self._grid = math.lcm(config.page_size, config.tile_size)
        self._inside = self.mode == "all" and not config.chunks_end_at_blocks

    def stops(self, prompt_len: int, hit: int, matched: int, marks: Collection[int] = ()) -> list[int]:
        """Returns the positions, in addition to multiples of B, at which prefill chunks of a request must end.

        Args:
            hit: tokens whose state was found.
            matched: tokens whose pages were found. If more tokens have pages than a state, another request shares this
                prefix and then diverges; a state at this junction serves the next such request. This applies to `align`
                only: `all` has a state within B tokens, so another chunk would not pay.
            marks: positions of the request's marks. Within a chunk, states are stored only at ends of tiles and pages.

        The end of the prompt is also a stop, because a resumed request would otherwise continue past it.
        """
        if self.mode == "none":
            return []
        stops = {prompt_len, *(mark for mark in marks if mark % self._grid)}
        junction = matched - matched % self.page
        if self.mode == "align" and junction < prompt_len:
            stops.add(junction)
        return sorted(stop for stop in stops if stop > hit)

    def positions(
        self, prompt_len: int, stops: Sequence[int], start: int, end: int, marks: Collection[int] = ()
    ) -> list[tuple[int, CheckpointKind, bool]]:
        """Returns the positions in (start, end] at which a prefill chunk publishes states, each with its kind, and
        whether it is of low value (`is_low_value`).

        Args:
            stops: the result of the method `stops` for the request.
        """
        if self.mode == "none":
            return []
        found: dict[int, CheckpointKind] = {}
        block = self.block
        if self.mode == "all":
            found = dict.fromkeys(range(start - start % block + block, end, block), CheckpointKind.BOUNDARY)
        if end == prompt_len:
            found[end] = CheckpointKind.PROMPT_END
        elif end in stops:
            found[end] = CheckpointKind.JUNCTION
        elif end % block == 0:
            found[end] = CheckpointKind.BOUNDARY
        found |= {
            mark: CheckpointKind.MARK for mark in marks if mark == end or (start < mark < end and not mark % self._grid)
        }
        return [(at, kind, self.is_low_value(prompt_len, at, kind)) for at, kind in sorted(found.items())]

    def most_states(self, tokens: int, rows: int) -> int:
        """Returns how many states a step writes at most that feeds this many tokens in this many rows.

        Each row writes one at its end and, before its end, publishes those at its marks and, in mode `all`, at
        multiples of B: n tokens have at most (n - 2 + B) // B of these inside.
        """
        marks = 0 if self.mode == "none" else MAX_MARKS
        blocks = (tokens + rows * (self.block - 2)) // self.block if self._inside else 0
        return rows * (1 + marks) + blocks

    def is_low_value(self, prompt_len: int, position: int, kind: CheckpointKind) -> bool:
        """Returns whether a new state must not evict a state of higher worth.

        This applies to boundaries of a prompt that a deeper boundary of the same prompt makes interior at once.
        """
        return kind == CheckpointKind.BOUNDARY and position + self.block <= prompt_len

    def rank(self, entry: Checkpoint) -> EvictionRank:
        """Returns the entry's rank. All entries of a lower rank are evicted before any of a higher rank."""
        if entry.stale:
            return EvictionRank.STALE
        if entry.kept_until:
            return EvictionRank.KEPT
        if len(entry.below) != 1:
            return EvictionRank.VALUABLE
        if entry.kind == CheckpointKind.BOUNDARY:
            return EvictionRank.INTERIOR
        return (
            EvictionRank.SUPERSEDED
            if entry.kind >= CheckpointKind.PROMPT_END and entry.hits < 2
            else EvictionRank.VALUABLE
        )

    def worth(self, entry: Checkpoint) -> int:
        """Returns the number of tokens that would be computed again without this state, times its hits.

        Within a rank, the entry with the lowest price is evicted first. The price is this worth plus the eviction price
        at the state's last use (GreedyDual). Among entries of equal worth the least recently used goes first, unused
        entries are evicted eventually, and a system prompt that many requests share outlives the ends of conversations.
        """
        above = entry.above.position if entry.above is not None else 0
        return (entry.position - above) * (1 + min(entry.hits, _MOST_HITS))
