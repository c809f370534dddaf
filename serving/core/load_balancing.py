"""Chooses a worker for a prompt: the one with the least to compute before it can answer.

Costs are counted in prompt tokens, so the workers' speeds need not be known: the tokens that a worker has been given
and not computed yet, and those of this prompt beyond the deepest state that it could continue from. A worker that
recently had more than its share must save as many tokens more; otherwise the first worker to compute a popular prefix
would receive all prompts that begin with it. `benchmarks/RESULTS.md` has a simulation of these rules.
"""

import math
from dataclasses import dataclass

LATELY = 60.0
"""Seconds in which the weight of past work falls to a third."""
EVENNESS = 0.5
"""Of the work that a worker has had lately beyond its share, the part that it must save for having more. Below 1: what
a lone conversation has had computed is what it saves, so it stays where it is."""
REQUEST = 64.0
"""Cost of every unfinished request in tokens, because it takes a part of each step."""


@dataclass(slots=True)
class Workload:
    """The work assigned to one worker, in prompt tokens."""

    pending: int = 0
    """Assigned tokens that are not computed yet."""
    _recent: float = 0.0
    _at: float = 0.0

    def given(self, tokens: int, now: float) -> None:
        """Adds tokens that the worker will compute. `now` is in seconds of any clock."""
        self.pending += tokens
        self._recent, self._at = self.recent(now) + tokens, now

    def computed(self, tokens: int) -> None:
        """Records that the worker has computed tokens, or will not."""
        self.pending -= tokens

    def recent(self, now: float) -> float:
        """Assigned prompt tokens, with exponentially decaying weight."""
        return self._recent * math.exp((self._at - now) / LATELY)


def price(tokens: float, *, pending: float, requests: int, recent: float, share: float) -> float:
    """The cost, in tokens, of assigning this many more tokens to a worker. `share`: the mean of all `recent`."""
    return pending + tokens + REQUEST * requests + EVENNESS * max(0.0, recent - share)
