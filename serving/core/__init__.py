"""Host policy: requests, pools, prefix index, scheduler. Pure Python; never imports JAX."""

from serving.core.cache.pools import Pool, Use
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.retention import RetentionPolicy
from serving.core.cache.row_replay import ReplayAccess
from serving.core.cache.row_state import StateAccess
from serving.core.config import CacheMode, SchedulerConfig, check_replay_interval, replay_intervals
from serving.core.planning.plan import DecodeRow, Emitted, PrefillRow, Row, StepPlan, StepResult
from serving.core.planning.remote import Hold
from serving.core.reasons import (
    ConfigError,
    FinishReason,
    MissReason,
    RequestError,
    WaitReason,
    check_prompt_length,
)
from serving.core.requests.drafts import AdaptiveDrafts, DraftPolicy
from serving.core.requests.request import PlannedRow, RemoteLoad, RemoteState, Request, Status
from serving.core.scheduler import Scheduler

__all__ = [
    "AdaptiveDrafts",
    "CacheMode",
    "CheckpointKind",
    "ConfigError",
    "DecodeRow",
    "DraftPolicy",
    "Emitted",
    "FinishReason",
    "Hold",
    "MissReason",
    "PlannedRow",
    "Pool",
    "PrefillRow",
    "RemoteLoad",
    "RemoteState",
    "ReplayAccess",
    "Request",
    "RequestError",
    "RetentionPolicy",
    "Row",
    "Scheduler",
    "SchedulerConfig",
    "StateAccess",
    "Status",
    "StepPlan",
    "StepResult",
    "Use",
    "WaitReason",
    "check_prompt_length",
    "check_replay_interval",
    "replay_intervals",
]
