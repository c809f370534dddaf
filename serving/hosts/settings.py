"""Every setting of serving over several hosts, defined once."""

from __future__ import annotations

import re

from pydantic import Field, model_validator

from serving.settings import Settings

MEETING_PORT = 8476
"""Default port of the coordinator."""


class HostSettings(Settings):
    """Which hosts run the engine together. `HostSettings.create` gives one-line errors."""

    distributed: bool = Field(
        False,
        description="One of several hosts that the environment tells of, as `jax.distributed` reads it (Cloud TPU, "
        "Slurm, Open MPI, Kubernetes).",
    )
    coordinator: str | None = Field(
        None,
        pattern=r"^[^:]+(:\d+)?$|^\[.+\](:\d+)?$",
        description=f"HOST or HOST:PORT of host 0, where all meet; a free port there (unset: {MEETING_PORT}).",
    )
    num_hosts: int | None = Field(None, ge=1, description="With --coordinator: number of hosts.")
    host_id: int | None = Field(None, ge=0, description="With --coordinator: number of this host; 0 leads.")
    plan_port: int = Field(
        0, ge=0, le=65535, description="Port of host 0 from which the others take its steps; 0 picks a free one."
    )
    host_timeout: float = Field(
        8.0, ge=2, description="Seconds of silence after which a host counts as lost, and all hosts end."
    )
    meeting_timeout: int = Field(300, ge=1, description="Seconds to wait at start-up until all hosts are there.")

    @model_validator(mode="after")
    def _all_or_none(self) -> HostSettings:
        given = [value is not None for value in (self.coordinator, self.num_hosts, self.host_id)]
        if any(given) and not all(given):
            raise ValueError("coordinator, num_hosts and host_id must be given together")
        if self.num_hosts is not None and self.host_id is not None and self.host_id >= self.num_hosts:
            raise ValueError(f"host_id {self.host_id}: the {self.num_hosts} hosts are 0 to {self.num_hosts - 1}")
        return self

    @property
    def several(self) -> bool:
        """Whether there is more than one host."""
        return self.distributed or (self.num_hosts or 1) > 1

    @property
    def meeting_place(self) -> str | None:
        """Host and port of the coordinator; None where the environment knows."""
        if self.coordinator is None or re.search(r":\d+$", self.coordinator):
            return self.coordinator
        return f"{self.coordinator}:{MEETING_PORT}"

    @property
    def meeting_host(self) -> str | None:
        """Host of the coordinator, without its port."""
        place = self.meeting_place
        return None if place is None else place.rpartition(":")[0].strip("[]")
