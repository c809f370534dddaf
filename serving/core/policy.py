"""What is worth keeping. Two questions, one object: which positions to publish, and which entry goes first.

Both are asked through `CachePolicy` alone, so that a policy which weighs depth, hits and bytes against each other can
take its place without a change anywhere else.
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


class CachePolicy:
    """The house policy: multiples of B, junctions and prompt ends; interior states of a chain go first, then LRU."""

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
        """Entries of lower rank go first, the least recently used of them before the others.

        Interior: exactly one state continues from it, so the chain survives its loss; nothing branches off.
        """
        return 0 if entry.kind == Kind.BOUNDARY and len(entry.below) == 1 else 1
