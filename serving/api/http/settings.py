"""Every setting of the server that is not the engine's, defined once: for Python, the command line and config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.config import ConfigError

LogFormat = Literal["text", "json"]
ToolCallParser = Literal["auto", "none", "hermes", "nemotron", "qwen3_coder"]


class ConnectionBounds(BaseModel):
    """Limits on what one connection, and all of them together, may hold."""

    max_connections: int = Field(4096, ge=1, description="Maximum number of open connections; further ones are closed.")
    header_timeout: float = Field(10.0, gt=0, description="Seconds to wait for a request's headers.")
    max_header_bytes: int = Field(
        64 << 10, ge=1024, description="Maximum size of a request's line and headers in bytes."
    )
    read_timeout: float = Field(60.0, gt=0, description="Seconds that a client may leave a response unread.")


class RequestBounds(BaseModel):
    """Checks on every request before a handler sees it, and the log line after."""

    api_key: tuple[str, ...] = Field(
        (), description="A key that clients must send; repeatable. Also read from MAMBA_JAX_API_KEY."
    )
    admin_key: tuple[str, ...] = Field(
        (),
        description="A key for the paths of operators, which nobody may use without one; repeatable. Also read from "
        "MAMBA_JAX_ADMIN_KEY.",
    )
    max_body_bytes: int = Field(
        8 << 20, ge=1024, description="Maximum size of a request body in bytes; larger ones are refused (413)."
    )
    max_body_values: int = Field(
        1 << 19,
        ge=1024,
        description="Maximum number of JSON values in a request body (413); strings, arrays and objects count as 10.",
    )
    max_buffered_bytes: int = Field(
        256 << 20, ge=1024, description="Maximum size in bytes of all request bodies held at once (503)."
    )
    body_timeout: float = Field(60.0, gt=0, description="Seconds to wait for a request's body (408).")
    log_requests: bool = Field(True, description="Log one line per request.")


class ServerSettings(ConnectionBounds, RequestBounds):
    """How the server listens, what it accepts and how it logs. `ServerSettings.create` gives one-line errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 serves the whole network.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    served_model_name: tuple[str, ...] = Field(
        ("default",),
        min_length=1,
        description="Name of the model in requests; repeatable, responses use the first. Unset: its directory's name.",
    )
    max_choices: int = Field(1024, ge=1, description="Maximum number of completions per request: prompts times n.")
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="Format of the model's tool calls: auto (detected from its chat template), none (left as text), "
        "hermes, nemotron or qwen3_coder.",
    )
    step_timeout: float = Field(
        120.0, gt=0, description="Seconds after which an engine step counts as stuck: requests and probes get 503."
    )
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests have to finish at shutdown.")
    log_format: LogFormat = Field("text", description="Log format: text or json.")
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Where to send OpenTelemetry spans (OTLP over HTTP), e.g. http://localhost:4318/v1/traces.",
    )
    profile_dir: str | None = Field(
        None, description="Folder for the profiles of /start_profile (XProf's). Unset: no profiles."
    )
    profile_timeout: float = Field(60.0, gt=0, description="Seconds after which a profile ends by itself.")
    default_sampling: Mapping[str, Any] = Field(
        default_factory=dict, description="Sampling parameters for what requests leave out."
    )

    @classmethod
    def create(cls, **values: Any) -> ServerSettings:
        """Validated settings; values that are None count as not given.

        Raises:
            ConfigError: a bad value.
        """
        given = {name: value for name, value in values.items() if value is not None}
        for name in ("served_model_name", "api_key", "admin_key"):
            if isinstance(given.get(name), str):
                given[name] = (given[name],)
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {first['msg'].lower()}, got {first['input']!r}") from None
