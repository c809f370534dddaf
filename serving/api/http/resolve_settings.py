"""Resolves a server's settings from the command line, the config file, the environment and the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from serving.api.http.settings import ServerSettings
from serving.config import ConfigError, EngineConfig
from serving.engine.request_error import RequestError
from serving.engine.requests.sampling_params import SamplingParams

_KEY_VARIABLES = {"api_key": "MAMBA_JAX_API_KEY", "admin_key": "MAMBA_JAX_ADMIN_KEY"}
_DEFAULTS = {
    # Compile before the first request, not during it.
    "warmup": True,
    # Without a limit, an overloaded server processes requests of clients that have already timed out.
    "max_num_waiting": 4096,
    # Clients stream the output of running requests.
    "max_decode_pause": 0.2,
    "enable_structured_outputs": True,
}
"""Engine flags with different defaults in servers than in the library."""


def resolve_settings(
    flags: dict[str, Any],
    given: dict[str, Any],
    *,
    with_generation_config: bool = True,
    override: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[ServerSettings, EngineConfig]:
    """Returns the settings of the server and of the engine.

    Args:
        flags: flags from the engine's options and the config file, which may also contain server settings.
        given: server settings from the command line; they take precedence over the file. None counts as unset.
        with_generation_config: use the checkpoint's sampling parameters.
        override: sampling parameters that replace the checkpoint's.

    Raises:
        ConfigError: a value is invalid, or the model does not exist.
    """
    from checkpoints import generation_config
    from checkpoints.hub import is_hub_name
    from serving.engine.assembly.fetch import fetched

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
        sampling = {name: getattr(recommended, name) for name in names}
        values["default_sampling"] = {name: value for name, value in sampling.items() if value is not None}
    if override:
        try:
            SamplingParams.of(override)
        except RequestError as error:
            raise ConfigError(f"--override-generation-config: {error}") from None
        values["default_sampling"] = {**values.get("default_sampling", {}), **override}
    return ServerSettings.create(**values), config
