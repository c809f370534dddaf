"""What is worth keeping. Two questions, one object: which positions to publish, and which entry goes first.

Both are asked through `RetentionPolicy` alone, so that another policy can take its place without any other change.
What this policy keeps of real traffic is measured by `serving/bench/prefix_reuse.py`.
"""

from collections.abc import Sequence
from enum import IntEnum

from serving.core.cache.prefix_tree import Checkpoint, CheckpointKind
from serving.core.config import SchedulerConfig


class EvictionRank(IntEnum):
    """The order in which states are evicted, before their worth is compared."""

    STALE = -1
    """Computed with weights that have been replaced: no request will match it."""
    INTERIOR = 0
    """A boundary from which exactly one state continues: the chain survives its loss, nothing branches off."""
    SUPERSEDED = 1
    """A prompt's end of which the same is true: what went on from it, a conversation say, no longer needs it."""
    VALUABLE = 2
    """The deepest states of their chains, branches, and prompts that are asked again and again."""


_MOST_HITS = 3
"""The most hits that count: without a bound, what was popular once would stay for a long time after."""


class RetentionPolicy:
    """Publishes multiples of B, junctions and prompt ends; evicts by `rank`, then by `worth`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.mode = config.cache_mode
        self.block = config.state_block_size
        self.page = config.page_size

    def stops(self, prompt_len: int, hit: int, matched: int) -> list[int]:
        """Where prefill chunks of a request must end, beyond what B asks.

        hit: tokens whose state was found. matched: tokens whose pages were found; pages deeper than the state mean
        that another request shares this prefix and then diverges: a state there serves the next such request (align
        only: `all` has a state within B of it anyway and would pay a chunk). The prompt's own end is a stop for a
        resumed request, which would otherwise run over it.
        """
        if self.mode == "none":
            return []
        stops = []
        junction = matched - matched % self.page
        if self.mode == "align" and hit < junction < prompt_len:
            stops.append(junction)
        if hit < prompt_len:
            stops.append(prompt_len)
        return stops

    def positions(
        self, prompt_len: int, stops: Sequence[int], start: int, end: int
    ) -> list[tuple[int, CheckpointKind]]:
        """Positions in (start, end] at which a prefill chunk's states are to be published, with their kinds.

        stops: those of the request, as `stops` gave them.
        """
        if self.mode == "none":
            return []
        found: list[tuple[int, CheckpointKind]] = []
        block = self.block
        if self.mode == "all":
            found = [(at, CheckpointKind.BOUNDARY) for at in range(start - start % block + block, end, block)]
        if end == prompt_len:
            found.append((end, CheckpointKind.PROMPT_END))
        elif end in stops:
            found.append((end, CheckpointKind.JUNCTION))
        elif end % block == 0:
            found.append((end, CheckpointKind.BOUNDARY))
        return found

    def is_low_value(self, prompt_len: int, position: int, kind: CheckpointKind) -> bool:
        """Whether a state to be published is worth so little that it must not displace one of more worth.

        That is so of a prompt's boundaries that a deeper one of the same prompt will make interior at once.
        """
        return kind == CheckpointKind.BOUNDARY and position + self.block <= prompt_len

    def rank(self, entry: Checkpoint) -> EvictionRank:
        """An `EvictionRank`: all entries of a lower one go before any of a higher one."""
        if entry.stale:
            return EvictionRank.STALE
        if len(entry.below) != 1:
            return EvictionRank.VALUABLE
        if entry.kind == CheckpointKind.BOUNDARY:
            return EvictionRank.INTERIOR
        return (
            EvictionRank.SUPERSEDED
            if entry.kind == CheckpointKind.PROMPT_END and entry.hits < 2
            else EvictionRank.VALUABLE
        )

    def worth(self, entry: Checkpoint) -> int:
        """Tokens that would be computed again without this state, times how often it was asked for.

        Of one rank, the lowest price goes first: this, and the price of what was being given up when the state was last
        used (GreedyDual). So of equal worth the least recently used goes first, nothing stays for ever unused, and a
        system prompt that many begin with outlives the ends of conversations for which there is no room anyway.
        """
        above = entry.above.position if entry.above is not None else 0
        return (entry.position - above) * (1 + min(entry.hits, _MOST_HITS))
