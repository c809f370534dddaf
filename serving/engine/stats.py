"""Statistics of an engine, and their sum over several engines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

import numpy as np

from serving.core.stats import exported
from serving.core.tiers.tiers import FetchStats


@dataclass
class DraftStats:
    """Counters of drafts by position in the step. A draft is accepted only if all earlier ones of the step are."""

    steps: int = 0
    """Number of rows with drafts, summed over all steps."""
    drafted_at: list[int] = exported(
        "draft_tokens", "Draft tokens that were verified, by position in the step.", "position", kind=list
    )
    accepted_at: list[int] = exported(
        "draft_tokens_accepted", "Draft tokens accepted, by position in the step.", "position", kind=list
    )
    """Drafts after a stop that ended the output count as well."""

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
        names = ("steps", "drafted", "accepted", "wasted", "acceptance_at", "mean_acceptance_length")
        return {name: getattr(self, name) for name in names}

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens per step of a row with drafts, the sampled token included; 1 without drafts."""
        return 1 + self.accepted / self.steps if self.steps else 1.0


def _seconds(part: str) -> Any:
    text = "Time of the engine's thread by activity: wait is for the device, all others are host work."
    return exported("step_seconds", text, "part", value=part)


@dataclass
class LoopStats:
    """Counters and times of a loop since it started."""

    steps: int = exported("steps", "Steps of the engine.")
    decode_rows: int = 0
    prefill_tokens: int = 0
    mixed_steps: int = 0
    """Number of steps with decode and prefill rows in one program."""
    lockstep_steps: int = exported(
        "lockstep_steps",
        "Steps that waited for the previous step's result, because most rows need it on the host.",
    )
    drafts: DraftStats = field(default_factory=DraftStats)
    failures: int = exported("step_failures", "Failed steps; the engine computed all state again.")
    not_finite: int = exported("outputs_not_finite", "Choices that ended because their logits were NaN or infinite.")
    plan_seconds: float = _seconds("plan")
    """Scheduling and batch building."""
    dispatch_seconds: float = _seconds("dispatch")
    """Calls of compiled programs, including compilation."""
    wait_seconds: float = _seconds("wait")
    """Waiting for results."""
    settle_seconds: float = _seconds("settle")
    """Assigning results to requests and updating outputs."""


def merged_stats(stats: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the merged `Engine.stats()` of several engines, and those of each engine under `engines`.

    Counters are added. The weights have one version, unless only some engines have been updated.
    """
    whole = added(stats)
    versions = dict.fromkeys(each["weights"]["version"] for each in stats)
    whole["weights"] = {
        "version": ", ".join(versions),
        "updates": max(each["weights"]["updates"] for each in stats),
    }
    if "tiers" in whole:
        whole["tiers"] = _tiers([each["tiers"] for each in stats])
    whole["page_size"] = stats[0].get("page_size")
    whole["drafts"] = DraftStats(**whole["loop"]["drafts"]).summary()
    whole["engines"] = list(stats)
    return whole


def _tiers(engines: Sequence[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Merges statistics of tiers: engines share the tiers' contents; their counters of fetches are added."""
    own = [field.name for field in fields(FetchStats)]
    return {
        name: shared | {key: sum(engine[name][key] for engine in engines) for key in own}
        for name, shared in engines[0].items()
    }


def added(values: Sequence[Any]) -> Any:
    """Adds numbers, including those in lists and dictionaries. For other values, returns the first that is not None."""
    first = next((value for value in values if value is not None), None)
    if isinstance(first, dict):
        names = dict.fromkeys(name for value in values for name in value)
        return {name: added([value.get(name) for value in values]) for name in names}
    if isinstance(first, list):
        return [sum(column) for column in zip_longest(*(value or [] for value in values), fillvalue=0)]
    if isinstance(first, int | float) and not isinstance(first, bool):
        return sum(value for value in values if value is not None)
    return first
