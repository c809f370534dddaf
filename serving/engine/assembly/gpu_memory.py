"""Sets the fraction of a GPU's memory that JAX allocates, and computes the fraction of it that the engine may use.

JAX's allocator reserves part of a GPU's memory when it first uses the GPU. An environment variable sets the fraction;
without it, JAX takes three quarters. The command line first sets the variable from `memory_utilization`, so that this
is a fraction of the whole device. An application that imports mamba-jax must set the variable itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

from serving.config import ConfigError

DEFAULT_SHARE = 0.75
VARIABLE = "XLA_CLIENT_MEM_FRACTION"
HEADROOM = 0.03
"""The fraction of a GPU's memory that JAX takes in addition to the engine's: for per-row arrays and fragmentation."""
_VARIABLES = (VARIABLE, "XLA_PYTHON_CLIENT_MEM_FRACTION")


def reserve_gpu_memory(utilization: float, environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes JAX take `reserved_share(utilization)` of each GPU's memory, unless the environment already sets a share.

    This has no effect after JAX's first use of a GPU, or on other platforms.
    """
    if _chosen_share(environment) is None:
        environment[VARIABLE] = f"{reserved_share(utilization):g}"


def reserved_share(utilization: float) -> float:
    """Returns the fraction of a GPU's memory that the command line makes JAX take."""
    return min(1.0, utilization + HEADROOM)


def usable_share(platform: str, utilization: float, environment: Mapping[str, str] = os.environ) -> float:
    """Returns the fraction of JAX's limit (`bytes_limit` of a device's memory statistics) that the engine may use.

    If the environment sets JAX's share of a GPU, the engine uses `utilization` of the whole device, but at most all of
    JAX's share. Otherwise it uses `utilization` of the limit.

    Raises:
        ConfigError: the environment's share is not a number above 0 and up to 1.
    """
    share = _chosen_share(environment) if platform == "gpu" else None
    return utilization if share is None else min(1.0, utilization / share)


def share_notices(platform: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Returns notices for the user if the environment does not set JAX's share of a GPU."""
    if platform != "gpu" or _chosen_share(environment) is not None:
        return ()
    return (
        f"JAX takes {DEFAULT_SHARE:.0%} of a GPU's memory, and memory_utilization is a fraction of that; set "
        f"{VARIABLE}=0.9 before JAX starts to use more",
    )


def _chosen_share(environment: Mapping[str, str]) -> float | None:
    for variable in _VARIABLES:
        if text := environment.get(variable):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ConfigError(f"{variable} is {text!r}; expected a number above 0 and up to 1")
            return share
    return None
