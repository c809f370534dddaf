"""The server's own settings, defined once for Python, the command line and config files, and how they are resolved."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.requests.sampling_params import SamplingParams, recommended_sampling
from serving.settings import JsonObject, Settings

LogFormat = Literal["text", "json"]
ToolCallForm = Literal["hermes", "jamba", "kimi_k2", "lfm2", "ling3", "nemotron", "olmo3", "qwen3_coder"]
ToolCallParser = Literal["auto", "none", ToolCallForm]

ReasoningParser = Literal["auto", "none", "think"]

_KEY_VARIABLES = {"api_key": "MAMBA_JAX_API_KEY", "admin_key": "MAMBA_JAX_ADMIN_KEY"}
_DEFAULTS = {
    "warmup": True,  # compile before the first request, not during it
    "max_num_waiting": 4096,  # otherwise an overloaded server processes requests of clients that have timed out
    "max_decode_pause": 0.2,  # clients stream the output of running requests
    "enable_structured_outputs": True,
}
"""Engine flags with different defaults in servers than in the library."""


class ConnectionBounds(Settings):
    """Limits of each connection, and of all connections together."""

    max_connections: int = Field(4096, ge=1)
    """Maximum number of open connections; requests on further ones get 503."""
    header_timeout: float = Field(10.0, gt=0)
    """Seconds to wait for a request's headers."""
    max_header_bytes: int = Field(64 << 10, ge=1024)
    """Maximum size of a request's line and headers, and of its trailers, in bytes."""
    read_timeout: float = Field(60.0, gt=0)
    """Seconds that a client may leave a response unread."""


class RequestBounds(Settings):
    """Checks on every request before a handler sees it, and the log line after."""

    api_key: tuple[str, ...] = ()
    """A key that clients must send; repeatable. Also read from MAMBA_JAX_API_KEY."""
    admin_key: tuple[str, ...] = ()
    """A key that operators must send for operators' paths; repeatable. Unset: these paths refuse all requests. Also
    read from MAMBA_JAX_ADMIN_KEY."""
    max_body_bytes: int = Field(8 << 20, ge=1024)
    """Maximum size of a request body in bytes; larger ones are refused (413)."""
    max_body_values: int = Field(1 << 19, ge=1024)
    """Maximum number of JSON values in a request body (413); strings, arrays and objects count as 10."""
    max_buffered_bytes: int = Field(256 << 20, ge=1024)
    """Maximum size in bytes of all unanswered requests' bodies together (503)."""
    body_timeout: float = Field(60.0, gt=0)
    """Seconds to wait for a request's body (408)."""
    log_requests: bool = True
    """Log one line per request."""
    log_format: LogFormat = "text"
    """Log format: text or json."""

    @field_validator("api_key", "admin_key")
    @classmethod
    def _keys_fit_a_header(cls, keys: tuple[str, ...]) -> tuple[str, ...]:
        if not all(key.isascii() and key.isprintable() and key and " " not in key for key in keys):
            raise PydanticCustomError("key", "a key must be printable ASCII without spaces, and not empty")
        return keys


class ServerSettings(ConnectionBounds, RequestBounds):
    """Settings of the HTTP server. `ServerSettings.create` raises one-line errors."""

    COMMON = (
        "host", "port", "served_model_name", "api_key", "tool_call_parser", "reasoning_parser", "log_requests",
        "ssl_keyfile", "ssl_certfile", "generation_config",
    )  # fmt: skip

    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 serves the whole network."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    served_model_name: tuple[str, ...] = Field(("default",), min_length=1)
    """Name of the model in requests; repeatable, responses use the first. Unset: its directory's name."""
    lora_modules: tuple[str, ...] = ()
    """Adapter as NAME=DIRECTORY, a model name in requests; repeatable. Needs enable_lora or max_initial_states."""
    share_prefix_cache: bool = False
    """With several API keys: share cached prefixes between keys."""
    max_choices: int = Field(1024, ge=1)
    """Maximum number of completions per request: prompts times n."""
    tool_call_parser: ToolCallParser = "auto"
    """Format of the model's tool calls: auto (detected from its chat template and tokens), none (left as text), hermes,
    jamba, kimi_k2, lfm2, ling3, nemotron, olmo3 or qwen3_coder."""
    reasoning_parser: ReasoningParser = "auto"
    """Marks around a model's reasoning: auto (detected from its chat template), none (left in the text) or think
    (<think> and </think>)."""
    max_stored_responses: int = Field(1024, ge=0)
    """Maximum number of responses of /v1/responses that the server stores for later turns."""
    max_stored_bytes: int = Field(64 << 20, ge=0)
    """Maximum size of all stored responses in bytes."""
    sse_keep_alive_interval: float = Field(10.0, ge=0)
    """Seconds between comments in a stream that waits for its first event; 0 sends none."""
    omit_system_lines: tuple[str, ...] = ()
    """Beginning of lines of system text that prompts omit, because a client changes them in each session; repeatable.
    Always omitted: x-anthropic-billing-header:."""
    step_timeout: float = Field(120.0, gt=0)
    """Seconds after which an engine step counts as stuck: requests and probes get 503."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests have to finish at shutdown."""
    otlp_traces_endpoint: str | None = Field(None, pattern="^https?://")
    """Where to send OpenTelemetry spans (OTLP over HTTP), e.g. http://localhost:4318/v1/traces."""
    vllm_metrics: bool = False
    """Also export metrics under vLLM's names, for vLLM dashboards."""
    allowed_origins: tuple[str, ...] = ()
    """An origin whose pages may call the server (CORS), or *; repeatable. Unset: none."""
    allowed_methods: tuple[str, ...] = ("*",)
    """A method that cross-origin pages may use; repeatable."""
    allowed_headers: tuple[str, ...] = ("*",)
    """A header that cross-origin pages may send; repeatable."""
    allow_credentials: bool = False
    """Allow cross-origin requests with credentials."""
    root_path: str = ""
    """Path prefix that a proxy adds, for example /models/one."""
    ssl_keyfile: str | None = None
    """Private key for TLS (PEM). Unset: plain HTTP."""
    ssl_certfile: str | None = None
    """Certificate for TLS, with its chain (PEM)."""
    profile_dir: str | None = None
    """Folder for the profiles of /start_profile (for XProf). Unset: no profiles."""
    profile_timeout: float = Field(60.0, gt=0)
    """Seconds after which the server ends a profile."""
    default_sampling: Mapping[str, Any] = Field(default_factory=dict)
    """Sampling parameters for fields that requests omit."""
    generation_config: bool = True
    """Use the checkpoint's recommended sampling parameters for fields that requests omit."""
    override_generation_config: JsonObject = Field({})
    """JSON object of default sampling parameters that replace the checkpoint's."""
    default_chat_template_kwargs: JsonObject = Field({})
    """JSON object of default variables of the chat template, e.g. '{"enable_thinking": false}'."""

    @property
    def adapter_paths(self) -> dict[str, str]:
        """The directory of each of `lora_modules`, by name."""
        return dict(module.split("=", 1) for module in self.lora_modules)

    @model_validator(mode="after")
    def _check(self) -> ServerSettings:
        names = [module.partition("=") for module in self.lora_modules]
        for name, equals, path in names:
            if not (name and path):
                raise ValueError(f"lora_modules {name + equals + path!r} is not NAME=DIRECTORY")
        every = [*self.served_model_name, *(name for name, _, _ in names)]
        twice = next((name for name in every if every.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"lora_modules: {twice!r} is the name of two models")
        if not all(map(str.strip, self.omit_system_lines)):
            raise ValueError("omit_system_lines has an empty text, with which every line begins: leave it out")
        if (self.ssl_keyfile is None) != (self.ssl_certfile is None):
            raise ValueError("ssl_keyfile and ssl_certfile must be given together")
        return self


def resolve_settings(flags: dict[str, Any], given: dict[str, Any]) -> tuple[ServerSettings, EngineConfig]:
    """Returns the settings of the server and of the engine.

    Args:
        flags: flags from the engine's options and the config file, which may also contain server settings.
        given: server settings from the command line; they take precedence over the file. None counts as unset.

    Raises:
        ConfigError: a value is invalid, or the model does not exist.
    """
    from checkpoints.resolve import is_hub_name
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
    chosen = ServerSettings.create(**values)
    recommended = chosen.generation_config and "default_sampling" not in values
    sampling = recommended_sampling(config.model) if recommended else chosen.default_sampling
    try:
        SamplingParams(**chosen.override_generation_config)
    except RequestError as error:
        raise ConfigError(f"--override-generation-config: {error}") from None
    return chosen.model_copy(update={"default_sampling": {**sampling, **chosen.override_generation_config}}), config
