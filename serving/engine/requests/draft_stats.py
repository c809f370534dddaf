"""Counters of accepted and rejected drafts, of one request or of all requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class DraftStats:
    """Counters of drafts by position in the step. A draft is accepted only if all earlier ones of the step are."""

    steps: int = 0
    """Number of rows with drafts, summed over all steps."""
    drafted_at: list[int] = field(default_factory=list)
    """Number of drafts in first position, in second position, ..."""
    accepted_at: list[int] = field(default_factory=list)
    """Number of these that were accepted. Drafts after a stop that ended the output count as well."""

    def add(self, drafted: Sequence[int], tokens: np.ndarray) -> None:
        """Counts the rows of a step, given the number of drafts and the emitted tokens ([rows, 1 + K], -1 = none)."""
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
        """Number of verified drafts."""
        return sum(self.drafted_at)

    @property
    def accepted(self) -> int:
        """Number of accepted drafts."""
        return sum(self.accepted_at)

    @property
    def wasted(self) -> int:
        """Number of rejected drafts."""
        return self.drafted - self.accepted

    @property
    def acceptance_at(self) -> list[float]:
        """The fraction of accepted drafts in first position, in second position, ..."""
        return [good / count for good, count in zip(self.accepted_at, self.drafted_at, strict=True)]

    def summary(self) -> dict[str, Any]:
        """Returns all counters and rates as a dictionary."""
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
        """Mean number of tokens per step of a row with drafts, the sampled token included; 1 without drafts."""
        return 1 + self.accepted / self.steps if self.steps else 1.0
