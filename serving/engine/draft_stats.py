"""How well drafts do: counters of one request, or of all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class DraftStats:
    """Drafts by their place in the step: the first may be right where the second is wrong, never the reverse."""

    steps: int = 0
    """Rows of steps that had drafts at all."""
    drafted_at: list[int] = field(default_factory=list)
    """How many drafts there were in first place, in second place, ..."""
    accepted_at: list[int] = field(default_factory=list)
    """And how many of them were accepted. Those after a stop that cut the output short count as well."""

    def add(self, drafted: Sequence[int], tokens: np.ndarray) -> None:
        """Counts rows of a step: how many drafts each had, and what it emitted ([rows, 1 + K], -1 = none)."""
        most = max(drafted, default=0)
        while len(self.drafted_at) < most:
            self.drafted_at.append(0)
            self.accepted_at.append(0)
        for count, row in zip(drafted, tokens, strict=False):
            if not count:
                continue
            self.steps += 1
            accepted = int((row >= 0).sum()) - 1
            for place in range(count):
                self.drafted_at[place] += 1
                self.accepted_at[place] += place < accepted

    @property
    def drafted(self) -> int:
        """Drafts that were verified."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Drafts that were right."""
        return sum(self.accepted_at)

    @property
    def wasted(self) -> int:
        """Drafts that were wrong, or came after a wrong one."""
        return self.drafted - self.accepted

    @property
    def acceptance_at(self) -> list[float]:
        """Of the drafts in first place, in second place, ...: the share that was accepted."""
        return [good / count for good, count in zip(self.accepted_at, self.drafted_at, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Everything there is to say about them."""
        return {
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "wasted": self.wasted,
            "acceptance_at": self.acceptance_at,
            "mean_acceptance_length": self.mean_acceptance_length,
        }

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens that a row with drafts gains by a step, the newly sampled one included; 1 without any."""
        return 1 + self.accepted / self.steps if self.steps else 1.0
