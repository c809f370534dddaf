"""Statistics of a step loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine.requests.draft_stats import DraftStats


@dataclass
class LoopStats:
    """Counters and times of a loop since it started."""

    steps: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    mixed_steps: int = 0
    """Number of steps with decode and prefill rows in one program."""
    lockstep_steps: int = 0
    """Number of steps planned only after reading the previous step's results, because rows needed them."""
    drafts: DraftStats = field(default_factory=DraftStats)
    failures: int = 0
    """Number of failed steps, which lost the store; all requests were computed again."""
    not_finite: int = 0
    """Number of choices that ended because their logits were NaN or infinite."""
    plan_seconds: float = 0.0
    """Scheduling and batch building."""
    dispatch_seconds: float = 0.0
    """Calls of compiled programs, including compilation."""
    wait_seconds: float = 0.0
    """Waiting for results."""
    settle_seconds: float = 0.0
    """Assigning results to requests and updating outputs."""

    @property
    def host_seconds_per_step(self) -> float:
        """Mean host time per step outside of dispatching and waiting."""
        return (self.plan_seconds + self.settle_seconds) / max(self.steps, 1)
