"""Host policy: requests, pools, prefix index, scheduler. Pure Python; never imports JAX."""

from serving.core.config import CacheMode, SchedulerConfig
from serving.core.drafts import AdaptiveDrafts, DraftPolicy
from serving.core.plan import DecodeRow, Emitted, PrefillRow, StepPlan, StepResult
from serving.core.policy import CachePolicy, Kind
from serving.core.reasons import ConfigError, FinishReason, MissReason, RequestRefused
from serving.core.remote import Hold, Load, RemoteState
from serving.core.request import Request, Status
from serving.core.scheduler import Scheduler

__all__ = [
    "AdaptiveDrafts",
    "CacheMode",
    "CachePolicy",
    "ConfigError",
    "DecodeRow",
    "DraftPolicy",
    "Emitted",
    "FinishReason",
    "Hold",
    "Kind",
    "Load",
    "MissReason",
    "PrefillRow",
    "RemoteState",
    "Request",
    "RequestRefused",
    "Scheduler",
    "SchedulerConfig",
    "Status",
    "StepPlan",
    "StepResult",
]
