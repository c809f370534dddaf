"""How many replicas a fleet needs, for Ray Serve's autoscaler.

Requests go from the router to the workers' own ports, and Serve, which counts calls of its handles, sees none of them.
So each replica reports `requests` (those it computes and those that wait there), and `wanted` divides their sum by
`target_ongoing_requests`. Delays, steps and bounds are Serve's own.
"""

from __future__ import annotations

import math
import re
from typing import Any, Protocol

from serving.config import ConfigError, EngineConfig

METRIC = "requests"
"""What a replica reports."""
_USUAL = {
    "prefill": 2.0,  # one is computed, one waits: a third would be computed sooner elsewhere
    "decode": 0.75,  # of the seats
}


class AutoscalingContext(Protocol):
    """What is used of `ray.serve.config.AutoscalingContext`."""

    aggregated_metrics: Any
    """Of each metric, by replica."""
    target_num_replicas: int
    config: Any


def wanted(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """A policy of Serve's autoscaler: replicas, and nothing to remember."""
    reported = (context.aggregated_metrics or {}).get(METRIC)
    if not reported:
        return context.target_num_replicas, {}  # none has started yet
    return max(1, math.ceil(sum(reported.values()) / context.config.target_ongoing_requests)), {}


def replicas(role: str, asked: object, flags: dict[str, Any]) -> dict[str, Any]:
    """Options of a Serve deployment for `asked` replicas: a number, or `1-4` for as many as it takes.

    Raises:
        ConfigError: it is neither.
    """
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", str(asked))
    if found is None or not 1 <= int(found[1]) <= int(found[2] or found[1]):
        raise ConfigError(
            f"{role}: a number of replicas such as 2, or the least and the most such as 1-4, got {asked!r}"
        )
    if found[2] is None:
        return {"num_replicas": int(found[1])}
    target = _USUAL[role]
    if role == "decode":
        target *= EngineConfig.create(**flags).max_num_seqs
    return {
        "autoscaling_config": {
            "min_replicas": int(found[1]),
            "max_replicas": int(found[2]),
            "target_ongoing_requests": max(1.0, target),
            "metrics_interval_s": 2.0,
            "look_back_period_s": 20.0,
            # A worker takes a minute to start, and its prefixes are lost when it ends: neither for a passing crowd.
            "upscale_delay_s": 20.0,
            "downscale_delay_s": 600.0,
            "policy": {"policy_function": f"{__name__}:{wanted.__name__}"},
        }
    }
