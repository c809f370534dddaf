"""How much of a GPU's memory JAX gives to programs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from serving.config import ConfigError

DEFAULT_SHARE = 0.75
VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_VARIABLES = ("XLA_CLIENT_MEM_FRACTION", VARIABLE)


def jax_share(platform: str, environment: Mapping[str, str] = os.environ) -> float:
    """The part of a device's memory that JAX's allocator has: of a GPU three quarters, unless the environment says
    otherwise. It is the limit whether or not it is taken at once (`XLA_PYTHON_CLIENT_PREALLOCATE`).

    Raises:
        ConfigError: the environment gives no such part.
    """
    if platform != "gpu":
        return 1.0
    for variable in _VARIABLES:
        if text := environment.get(variable):
            try:
                share = float(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise ConfigError(f"{variable} is {text!r}: a number above 0 and up to 1 is expected")
            return share
    return DEFAULT_SHARE


def share_notices(platform: str, environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """What a user should know who has left the choice to JAX."""
    if platform != "gpu" or any(environment.get(variable) for variable in _VARIABLES):
        return ()
    return (
        f"JAX takes {DEFAULT_SHARE:.0%} of a GPU's memory, and memory_utilization is a part of that: "
        f"{VARIABLE}=0.95 in the environment gives it more",
    )
