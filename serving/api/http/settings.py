"""Every setting of the server that is not the engine's, defined once: for Python, the command line and config files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.config import ConfigError

LogFormat = Literal["text", "json"]
ToolCallParser = Literal["auto", "none", "hermes", "nemotron", "qwen3_coder"]


class ServerSettings(BaseModel):
    """How the server listens, what it accepts and how it logs. `ServerSettings.create` gives one-line errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    host: str = Field("127.0.0.1", description="Address to listen on. 0.0.0.0 serves the whole network.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    served_model_name: tuple[str, ...] = Field(
        ("default",), min_length=1, description="What clients call the model; repeatable, the first one is reported."
    )
    api_key: tuple[str, ...] = Field(
        (), description="A key that clients must send; repeatable. Also read from MAMBA_JAX_API_KEY."
    )
    max_body_bytes: int = Field(8 << 20, ge=1024, description="Larger requests are refused (413).")
    body_timeout: float = Field(60.0, gt=0, description="Seconds in which a request's body must have arrived (408).")
    max_choices: int = Field(1024, ge=1, description="Prompts times n that one request may ask for.")
    tool_call_parser: ToolCallParser = Field(
        "auto",
        description="How the model writes calls of tools: auto (as its chat template does), none (they stay text), "
        "hermes, nemotron or qwen3_coder.",
    )
    drain_timeout: float = Field(30.0, ge=0, description="Seconds that running requests get to end at shutdown.")
    log_format: LogFormat = Field("text", description="text for people, json for machines.")
    log_requests: bool = Field(True, description="One line a request.")
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="Where OpenTelemetry spans go, e.g. http://localhost:4318/v1/traces (OTLP over HTTP).",
    )
    default_sampling: Mapping[str, Any] = Field(
        default_factory=dict, description="Sampling parameters of requests that do not have them."
    )

    @classmethod
    def create(cls, **values: Any) -> ServerSettings:
        """Validated settings; values that are None count as not given.

        Raises:
            ConfigError: a bad value, said in one line.
        """
        given = {name: value for name, value in values.items() if value is not None}
        for name in ("served_model_name", "api_key"):
            if isinstance(given.get(name), str):
                given[name] = (given[name],)
        try:
            return cls(**given)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ConfigError(f"{where}: {first['msg'].lower()}, got {first['input']!r}") from None
