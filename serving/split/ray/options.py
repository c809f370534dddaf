"""The options of the Ray Serve application: its arguments by recipient, and the numbers of replicas.

Serve counts calls of its handles, but requests go from the router directly to the workers' ports. So each replica
reports its running and waiting `requests`, and `wanted` divides their sum by `target_ongoing_requests`.
"""

from __future__ import annotations

import math
import re
import secrets
from dataclasses import dataclass
from typing import Any

from serving.api.http.settings import ServerSettings
from serving.config import ConfigError, EngineConfig
from serving.split.settings import RouterSettings, SplitSettings

_FIXED = frozenset({"role", "advertise", "host", "port", "prefill", "decode", "resources"})
"""Settings that the application chooses itself."""
METRIC = "requests"
"""Name of the metric that a replica reports."""
_TARGET_REQUESTS = {
    "prefill": 2.0,  # one request runs and one waits; another replica would compute a third one earlier
    "decode": 0.75,  # fraction of the batch rows
}


@dataclass(frozen=True)
class Arguments:
    """Settings of workers, their servers, the router and the engines. Some settings have several recipients."""

    split: dict[str, Any]
    server: dict[str, Any]
    routing: dict[str, Any]
    engine: dict[str, Any]

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Arguments:
        """Sorts the arguments of an application. Creates a secret unless one is given.

        Raises:
            ConfigError: an unknown setting or an invalid value.
        """
        named = {"split_secret": secrets.token_hex(32)} | {k: v for k, v in arguments.items() if k not in _FIXED}
        kinds: tuple[type[Any], ...] = (SplitSettings, ServerSettings, RouterSettings)
        split, server, routing = (
            {name: value for name, value in named.items() if name in kind.model_fields} for kind in kinds
        )
        engine = {name: value for name, value in named.items() if name not in {*split, *server, *routing}}
        # Validate here, so that errors do not appear only in a replica's log.
        for kind, part in zip(kinds, (split, server, routing), strict=True):
            kind.create(**part)
        EngineConfig.create(**engine)
        return cls(split, server, routing, engine)


def wanted(context: Any) -> tuple[int, dict[str, Any]]:
    """Returns the number of replicas, and no state. This is an autoscaling policy of Serve, whose
    `ray.serve.config.AutoscalingContext` it gets."""
    reported = (context.aggregated_metrics or {}).get(METRIC)
    if not reported:
        return context.target_num_replicas, {}  # no replica has started yet
    return max(1, math.ceil(sum(reported.values()) / context.config.target_ongoing_requests)), {}


def replicas(role: str, number: object, flags: dict[str, Any]) -> dict[str, Any]:
    """Returns the options of a Serve deployment. `number`: number of replicas, or a range such as `1-4`.

    Raises:
        ConfigError: `number` is neither.
    """
    matched = re.fullmatch(r"(\d+)(?:-(\d+))?", str(number))
    if matched is None or not 1 <= int(matched[1]) <= int(matched[2] or matched[1]):
        raise ConfigError(f"{role} must be a number of replicas such as 2, or a range such as 1-4, got {number!r}")
    if matched[2] is None:
        return {"num_replicas": int(matched[1])}
    target = _TARGET_REQUESTS[role]
    if role == "decode":
        target *= EngineConfig.create(**flags).max_num_seqs
    return {
        "autoscaling_config": {
            "min_replicas": int(matched[1]),
            "max_replicas": int(matched[2]),
            "target_ongoing_requests": max(1.0, target),
            "metrics_interval_s": 2.0,
            "look_back_period_s": 20.0,
            # A worker takes a minute to start and loses its prefixes when it ends, so react slowly.
            "upscale_delay_s": 20.0,
            "downscale_delay_s": 600.0,
            "policy": {"policy_function": f"{__name__}:{wanted.__name__}"},
        }
    }
