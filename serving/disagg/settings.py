"""Every setting of the split, defined once: of the roles of `mamba-jax serve`, and of `mamba-jax router`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from serving.config import ConfigError
from serving.disagg.wire import FailurePolicy, Handoff

Role = Literal["prefill", "decode"]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def create(cls, **values: Any) -> Any:
        """Validated settings; values that are None count as not given.

        Raises:
            ConfigError: a bad value, said in one line.
        """
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "settings"
            raise ConfigError(f"{name}: {first['msg'].lower()}, got {first['input']!r}") from None


class SplitSettings(_Settings):
    """Of one worker."""

    role: Role | None = Field(
        None, description="prefill or decode, behind `mamba-jax router`. Unset: a server that does both by itself."
    )
    transport: tuple[Literal["jax", "tcp"], ...] = Field(
        (),
        description="How states travel: jax (from device to device, by JAX's transfer engine) or tcp (by way of the "
        "hosts); repeatable, the preferred one first. Unset: jax where this JAX has it, then tcp.",
    )
    advertise: str | None = Field(None, description="Host name or address at which other workers reach this one.")
    lease: float = Field(30.0, gt=0, description="prefill: seconds for which a state waits to be fetched.")
    max_kept: int = Field(64, ge=1, description="prefill: states that wait at once, at most.")
    on_failure: FailurePolicy = Field(
        "recompute", description="decode: what becomes of a request whose state does not arrive, recompute or fail."
    )
    fetch_timeout: float = Field(30.0, gt=0, description="decode: seconds that a state may take to arrive.")
    convert_state: bool = Field(False, description="decode: take recurrent states of another dtype, and convert them.")

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Engine flags that a role sets where the user does not: what it must keep for the other side."""
        return {"keep_draft_kv": True} if self.role == "prefill" else {}


class RouterSettings(_Settings):
    """Of the router."""

    prefill: tuple[str, ...] = Field((), description="URL of a prefill worker; repeatable.")
    decode: tuple[str, ...] = Field((), description="URL of a decode worker; repeatable.")
    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on.")
    handoff: Handoff = Field(
        "full",
        description="full: the decode worker samples the first token from what it gets. recompute-last: it runs the "
        "prompt's last token itself.",
    )
    on_failure: FailurePolicy = Field(
        "recompute", description="Where no prefill worker is to be had: recompute on the decode worker, or fail."
    )
    split_above: int = Field(0, ge=0, description="Characters of prompt up to which a decode worker does it all alone.")
    affinity: int = Field(2048, ge=0, description="First characters of a prompt by which its workers are chosen.")
    slack: int = Field(4, ge=0, description="Requests that the chosen worker may have more than the least busy one.")
    check_interval: float = Field(1.0, gt=0, description="Seconds between two looks at each worker's health.")
    connect_timeout: float = Field(3.0, gt=0, description="Seconds in which a worker must accept a connection.")
