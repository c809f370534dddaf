"""Host policy: requests, pools, prefix index, scheduler. Pure Python; never imports JAX."""

from serving.core.cache.pools import Pool
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.retention import Mark
from serving.core.cache.row_forms import ReplayAccess
from serving.core.cache.row_state import StateAccess
from serving.core.config import CacheMode, SchedulerConfig
from serving.core.errors import (
    ConfigError,
    FinishReason,
    MissReason,
    RequestError,
    check_prompt_length,
)
from serving.core.planning.plan import DecodeRow, PrefillRow, Row, RowResult, StepPlan, StepResult
from serving.core.requests.drafts import AdaptiveDrafts, DraftPolicy
from serving.core.requests.request import RemoteLoad, RemoteState, Request, ResultDisposition, Status
from serving.core.scheduler import Scheduler

__all__ = [
    "AdaptiveDrafts",
    "CacheMode",
    "CheckpointKind",
    "ConfigError",
    "DecodeRow",
    "DraftPolicy",
    "FinishReason",
    "Mark",
    "MissReason",
    "Pool",
    "PrefillRow",
    "RemoteLoad",
    "RemoteState",
    "ReplayAccess",
    "Request",
    "RequestError",
    "ResultDisposition",
    "Row",
    "RowResult",
    "Scheduler",
    "SchedulerConfig",
    "StateAccess",
    "Status",
    "StepPlan",
    "StepResult",
    "check_prompt_length",
]
