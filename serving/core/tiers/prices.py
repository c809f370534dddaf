"""Whether fetching takes less time than computing: both as they were measured while serving.

The first fetch and the first prompt are measurements. An estimate that says no would never be looked at again; so each
no moves it a little in favor of fetching, until one fetch is tried.
"""

from dataclasses import dataclass, field

_WEIGHT = 0.2  # of the latest measurement in a running average
_FORGETTING = 1 / 64
"""By how much less a fetch is expected to take after each time that it was expected to take too long."""


@dataclass(slots=True)
class Prices:
    """Seconds per prompt token, and per byte by tier; None before anything was measured."""

    per_token: float | None = None
    per_byte: dict[str, float] = field(default_factory=dict)

    def computed(self, tokens: int, seconds: float) -> None:
        """Records the duration of a step with this number of prompt tokens."""
        if tokens > 0 and seconds > 0:
            self.per_token = _average(self.per_token, seconds / tokens)

    def fetched(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Records the duration of a fetch of this number of bytes from a tier."""
        if num_bytes > 0 and seconds > 0:
            self.per_byte[tier] = _average(self.per_byte.get(tier), seconds / num_bytes)

    def worth_fetching(self, tier: str, num_bytes: int, tokens: int) -> bool:
        """Returns whether fetching these bytes, after those already queued, is faster than computing these tokens."""
        rate = self.per_byte.get(tier)
        if rate is None or self.per_token is None or num_bytes * rate <= tokens * self.per_token:
            return True
        self.per_byte[tier] = rate * (1 - _FORGETTING)
        return False


def _average(before: float | None, latest: float) -> float:
    return latest if before is None else before + _WEIGHT * (latest - before)
