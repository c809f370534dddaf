"""Host policy: requests, pools, prefix index, scheduler. Pure Python; never imports JAX."""

from serving.core.config import CacheMode, SchedulerConfig
from serving.core.plan import DecodeRow, Emitted, PrefillRow, StepPlan, StepResult
from serving.core.reasons import ConfigError, FinishReason, MissReason, RequestRefused
from serving.core.request import Request, Status

__all__ = [
    "CacheMode",
    "ConfigError",
    "DecodeRow",
    "Emitted",
    "FinishReason",
    "MissReason",
    "PrefillRow",
    "Request",
    "RequestRefused",
    "SchedulerConfig",
    "Status",
    "StepPlan",
    "StepResult",
]
