"""Every setting of serving over several hosts, defined once."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import Field, model_validator

from serving.settings import Settings

MEETING_PORT = 8476  # default port of the coordinator
_PORTS = 4096  # ports of coordinators whose jobs the environment names: the highest ones


class HostSettings(Settings):
    """Which hosts run the engine together. `HostSettings.create` gives one-line errors."""

    distributed: bool = False
    """One of several hosts that the environment names, as `jax.distributed` reads it (Cloud TPU, Slurm, Open MPI,
    Kubernetes)."""
    coordinator: str | None = Field(
        None,
        pattern=r"^[^:]+(:\d+)?$|^\[.+\](:\d+)?$",
        description="HOST or HOST:PORT of host 0, to which all hosts connect. The port must be free; it is "
        f"{MEETING_PORT} if unset.",
    )
    num_hosts: int | None = Field(None, ge=1)
    """With --coordinator: number of hosts."""
    host_id: int | None = Field(None, ge=0)
    """With --coordinator: number of this host; 0 leads."""
    plan_port: int = Field(0, ge=0, le=65535)
    """Port on which host 0 sends its steps to the others; 0 picks a free one."""
    host_timeout: float = Field(8.0, ge=2)
    """Seconds of silence after which a host counts as lost, and all hosts end."""
    meeting_timeout: int = Field(300, ge=1, le=1_000_000)
    """Seconds to wait at startup for all hosts to connect."""

    @model_validator(mode="after")
    def _all_or_none(self) -> HostSettings:
        given = [value is not None for value in (self.coordinator, self.num_hosts, self.host_id)]
        if any(given) and not all(given):
            raise ValueError("coordinator, num_hosts and host_id must be given together")
        if self.num_hosts is not None and self.host_id is not None and self.host_id >= self.num_hosts:
            raise ValueError(f"host_id {self.host_id}: the {self.num_hosts} hosts are 0 to {self.num_hosts - 1}")
        return self

    def in_environment(self, variables: Mapping[str, str]) -> HostSettings:
        """Returns these settings, with `distributed` also the coordinator, number and count of hosts that Slurm, Open
        MPI or Kubernetes Engine (one TPU slice) name in environment variables; unchanged where they name none."""
        if not self.distributed or self.coordinator is not None:
            return self
        slurm = re.match(r"([^,\[]+)(?:\[(\w+))?", variables.get("SLURM_STEP_NODELIST", ""))
        mpi = re.match(r"(\d+)\..*?(?:tcp://(.+?)[,:]|tcp6://(\[.+?)[,\]])", variables.get("OMPI_MCA_orte_hnp_uri", ""))
        workers = None
        if "MEGASCALE_NUM_SLICES" not in variables:
            workers = variables.get("TPU_PROCESS_ADDRESSES") or variables.get("TPU_WORKER_HOSTNAMES")
        try:
            if mpi:  # first, as JAX has it: `mpirun` within an allocation of Slurm
                place, job = mpi[2] or f"{mpi[3]}]", int(mpi[1]) // _PORTS
                hosts, host = int(variables["OMPI_COMM_WORLD_SIZE"]), int(variables["OMPI_COMM_WORLD_RANK"])
            elif slurm:
                place, job = slurm[1] + (slurm[2] or ""), int(variables["SLURM_JOB_ID"])
                hosts, host = int(variables["SLURM_NTASKS"]), int(variables["SLURM_PROCID"])
            elif workers:
                place, job = workers.split(",")[0].split(":")[0], 0
                hosts, host = workers.count(",") + 1, int(variables["TPU_WORKER_ID"])
            else:
                return self
        except (KeyError, ValueError):
            return self
        # Jobs may share a machine.
        port = variables.get("JAX_COORDINATOR_PORT", f"{(1 << 16) - _PORTS + job % _PORTS}")
        named = {"coordinator": f"{place}:{port}", "num_hosts": hosts, "host_id": host}
        return HostSettings.create(**self.model_dump() | named)

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
