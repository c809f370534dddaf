"""Which of several workers should have a prompt: the one that would have to compute the least before it can answer.

Everything is counted in prompt tokens, so nobody's speed has to be known: what a worker has been given and not computed
yet, and what it would have to compute of this prompt, beyond the deepest state that it could go on from. One that has
had more than its share lately must save so much more: else whoever was first to compute a popular beginning would get
all that begin with it. What these rules do to a fleet is simulated by `benchmarks.replica_placement`.
"""

import math
from dataclasses import dataclass

LATELY = 60.0
"""Seconds after which work counts for a third of what it did."""
EVENNESS = 0.5
"""Of the work that a worker has had lately beyond its share, the part that it must save for having more. Below 1: what
a lone conversation has had computed is what it saves, so it stays where it is."""
REQUEST = 64.0
"""Tokens that every request under way counts for: it takes its part of each step."""


@dataclass(slots=True)
class Workload:
    """What one worker has been given, in prompt tokens."""

    pending: int = 0
    """Not computed yet."""
    _recent: float = 0.0
    _at: float = 0.0

    def given(self, tokens: int, now: float) -> None:
        """It is to compute so many. `now` is in seconds, by any clock."""
        self.pending += tokens
        self._recent, self._at = self.recent(now) + tokens, now

    def computed(self, tokens: int) -> None:
        """It has, or will not."""
        self.pending -= tokens

    def recent(self, now: float) -> float:
        """What it has been given, that of long ago counted less."""
        return self._recent * math.exp((self._at - now) / LATELY)


def price(tokens: float, *, pending: float, requests: int, recent: float, share: float) -> float:
    """What it costs, in tokens, to give a worker so many more to compute. `share`: the mean of all `recent`."""
    return pending + tokens + REQUEST * requests + EVENNESS * max(0.0, recent - share)
