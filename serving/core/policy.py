"""What is worth keeping. Two questions, one object: which positions to publish, and which entry goes first.

Both are asked through `CachePolicy` alone, so that another policy can take its place without a change anywhere else.
What the house policy keeps of real traffic is measured by `benchmarks/prefix_reuse.py`.
"""

from typing import TYPE_CHECKING

from serving.core.config import SchedulerConfig
from serving.core.request import Request

if TYPE_CHECKING:
    from serving.core.prefix_index import StateEntry


class Kind:
    """Why a state was published, in rising order of worth."""

    BOUNDARY = 0
    JUNCTION = 1
    PROMPT_END = 2


class Rank:
    """In which order states go, whatever else is to be said for them."""

    INTERIOR = 0
    """A boundary from which exactly one state continues: the chain survives its loss, nothing branches off."""
    PASSED = 1
    """A prompt's end of which the same is true: what went on from it, a conversation say, no longer needs it."""
    KEPT = 2
    """The deepest states of their chains, branches, and prompts that are asked again and again."""


_MOST_HITS = 3
"""Hits that count: without a bound, what was popular once would stay for as long again."""


class CachePolicy:
    """The house policy: publishes multiples of B, junctions and prompt ends; gives up by `rank`, then by `worth`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.mode = config.cache_mode
        self.block = config.state_block_size
        self.page = config.page_size

    def stops(self, request: Request, hit: int, matched: int) -> list[int]:
        """Where prefill chunks of a request must end, beyond what B asks.

        hit: tokens whose state was found. matched: tokens whose pages were found; pages that reach deeper than the
        state say that somebody else began like this and went another way: a state there serves the next one (align
        only: `all` has a state within B of it anyway and would pay a chunk). The prompt's own end is a stop for a
        resumed request, which would otherwise run over it.
        """
        if self.mode == "none":
            return []
        stops = []
        junction = matched - matched % self.page
        if self.mode == "align" and hit < junction < request.prompt_len:
            stops.append(junction)
        if hit < request.prompt_len:
            stops.append(request.prompt_len)
        return stops

    def positions(self, request: Request, start: int, end: int) -> list[tuple[int, int]]:
        """Positions in (start, end] at which a prefill chunk's states are to be published, with their kinds."""
        if self.mode == "none":
            return []
        found = []
        block = self.block
        if self.mode == "all":
            found = [(at, Kind.BOUNDARY) for at in range(start - start % block + block, end, block)]
        if end == request.prompt_len:
            found.append((end, Kind.PROMPT_END))
        elif end in request.stops:
            found.append((end, Kind.JUNCTION))
        elif end % block == 0:
            found.append((end, Kind.BOUNDARY))
        return found

    def modest(self, request: Request, position: int, kind: int) -> bool:
        """Whether a state to be published is worth so little that it must not displace one of more worth.

        That is so of a prompt's boundaries that a deeper one of the same prompt will make interior at once.
        """
        return kind == Kind.BOUNDARY and position + self.block <= request.prompt_len

    def rank(self, entry: "StateEntry") -> int:
        """A `Rank`: all entries of a lower one go before any of a higher one."""
        if len(entry.below) != 1:
            return Rank.KEPT
        if entry.kind == Kind.BOUNDARY:
            return Rank.INTERIOR
        return Rank.PASSED if entry.kind == Kind.PROMPT_END and entry.hits < 2 else Rank.KEPT

    def worth(self, entry: "StateEntry") -> int:
        """Tokens that would be computed again without this state, times how often it was asked for.

        Of one rank, the lowest price goes first: this, and the price of what was being given up when the state was last
        used (GreedyDual). So of equal worth the least recently used goes first, nothing stays for ever unused, and a
        system prompt that many begin with outlives the ends of conversations for which there is no room anyway.
        """
        above = entry.above.position if entry.above is not None else 0
        return (entry.position - above) * (1 + min(entry.hits, _MOST_HITS))
