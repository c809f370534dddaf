"""What a step loop has done, in numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

from serving.engine.draft_stats import DraftStats


@dataclass
class LoopStats:
    """What the loop has done since it started."""

    steps: int = 0
    decode_rows: int = 0
    prefill_tokens: int = 0
    lockstep_steps: int = 0
    """Times that the next step could not be planned before the last one was read: a row needs the host to know it."""
    drafts: DraftStats = field(default_factory=DraftStats)
    failures: int = 0
    """Steps lost with their store; everything was computed again."""
    not_finite: int = 0
    """Choices that ended because their logits were NaN or infinite."""
    plan_seconds: float = 0.0
    """Scheduling and batch building."""
    dispatch_seconds: float = 0.0
    """Calls of compiled programs, compiling them included."""
    wait_seconds: float = 0.0
    """Waiting for results."""
    settle_seconds: float = 0.0
    """Crediting results to requests and making outputs of them."""

    @property
    def host_seconds_per_step(self) -> float:
        """What the host does while it neither dispatches nor waits."""
        return (self.plan_seconds + self.settle_seconds) / max(self.steps, 1)
