"""A server's settings from everywhere they can come from: given ones, a file's, the environment's, the checkpoint's."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from serving.api.http.settings import ServerSettings
from serving.config import ConfigError, EngineConfig
from serving.engine.request_error import RequestError
from serving.engine.sampling_params import SamplingParams

_KEY_VARIABLES = {"api_key": "MAMBA_JAX_API_KEY", "admin_key": "MAMBA_JAX_ADMIN_KEY"}
_DEFAULTS = {
    # Compile before the first request rather than during it.
    "warmup": True,
    # Without a limit, overload becomes a queue of requests whose clients have given up.
    "max_num_waiting": 4096,
    # Clients read the output of running requests as it is generated.
    "max_decode_pause": 0.2,
    "enable_structured_outputs": True,
}
"""Engine flags whose defaults differ from the library's, for every server."""


def settle(
    flags: dict[str, Any],
    given: dict[str, Any],
    *,
    with_generation_config: bool = True,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[ServerSettings, EngineConfig]:
    """Settings of the server and of the engine. `flags` come from the engine's options and the config file, which may
    also hold server settings; `given` ones, as from the command line, take precedence. `override` has sampling
    parameters that take the place of the checkpoint's.

    Raises:
        ConfigError: a bad value, or a model that does not exist.
    """
    from checkpoints import generation_config
    from checkpoints.hub import is_hub_name
    from serving.engine.fetch import fetched

    file = {name: flags.pop(name) for name in list(flags) if name in ServerSettings.model_fields}
    config = EngineConfig.create(**(_DEFAULTS | flags))
    values = file | {name: value for name, value in given.items() if value is not None}
    whole = config.model == "demo" or is_hub_name(config.model)
    values.setdefault("served_model_name", (config.model if whole else Path(config.model).name,))
    config = fetched(config)
    for setting, variable in _KEY_VARIABLES.items():
        if os.environ.get(variable):  # an empty variable counts as unset
            values.setdefault(setting, (os.environ[variable],))
    if with_generation_config and "default_sampling" not in values:
        recommended = generation_config(config.model)
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        found = {name: getattr(recommended, name) for name in names}
        values["default_sampling"] = {name: value for name, value in found.items() if value is not None}
    if override:
        try:
            SamplingParams.of(override)
        except RequestError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None
        values["default_sampling"] = {**values.get("default_sampling", {}), **override}
    return ServerSettings.create(**values), config
