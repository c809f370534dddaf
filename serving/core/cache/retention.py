"""Decides which states to publish and which to evict first.

Only `RetentionPolicy` makes these decisions, so that another policy can replace it without other changes.
`benchmarks/RESULTS.md` has the reuse that this policy achieved with recorded traffic.
"""

from collections.abc import Sequence
from enum import IntEnum

from serving.core.cache.prefix_tree import Checkpoint, CheckpointKind
from serving.core.config import SchedulerConfig


class EvictionRank(IntEnum):
    """The order of eviction. Within one rank, worth decides."""

    STALE = -1
    """Computed with weights that have since been replaced: no request will match it."""
    INTERIOR = 0
    """A boundary with exactly one state below it: no prefix branches off here, so its loss costs the least."""
    SUPERSEDED = 1
    """The end of a prompt with exactly one state below it: the conversation has continued past it."""
    VALUABLE = 2
    """The deepest states of their chains, branching points, and prompts that requests repeat."""


_MOST_HITS = 3
"""Maximum number of hits that count. Without it, a state that was popular once would stay cached long after its last
hit."""


class RetentionPolicy:
    """Publishes states at multiples of B, junctions and prompt ends; evicts by `rank`, then by `worth`."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.mode = config.cache_mode
        self.block = config.state_block_size
        self.page = config.page_size

    def stops(self, prompt_len: int, hit: int, matched: int) -> list[int]:
        """Returns the positions, in addition to multiples of B, at which prefill chunks of a request must end.

        Args:
            hit: tokens whose state was found.
            matched: tokens whose pages were found. If more tokens have pages than a state, another request shares this
                prefix and then diverges; a state at this junction serves the next such request. This applies to `align`
                only: `all` has a state within B tokens, so another chunk would not pay.

        The end of the prompt is also a stop, because a resumed request would otherwise continue past it.
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
        """Returns the positions in (start, end] at which a prefill chunk publishes states, with their kinds.

        Args:
            stops: the result of the method `stops` for the request.
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
        """Returns whether a new state must not evict a state of higher worth.

        This applies to boundaries of a prompt that a deeper boundary of the same prompt makes interior at once.
        """
        return kind == CheckpointKind.BOUNDARY and position + self.block <= prompt_len

    def rank(self, entry: Checkpoint) -> EvictionRank:
        """Returns the entry's rank. All entries of a lower rank are evicted before any of a higher rank."""
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
        """Returns the number of tokens that would be computed again without this state, times its hits.

        Within a rank, the entry with the lowest price is evicted first. The price is this worth plus the eviction price
        at the state's last use (GreedyDual). Among entries of equal worth the least recently used goes first, unused
        entries are evicted eventually, and a system prompt that many requests share outlives the ends of conversations.
        """
        above = entry.above.position if entry.above is not None else 0
        return (entry.position - above) * (1 + min(entry.hits, _MOST_HITS))
