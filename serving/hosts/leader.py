"""The host that schedules: it sends each batch to the followers before it dispatches the batch itself."""

from __future__ import annotations

from typing import NoReturn

from mamba_jax.programs import Batch
from serving.engine.steps.loop import StepLoop
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind
from serving.hosts.wire import to_bytes


class Leader:
    """A loop's `followers`. From its making on, the loop dispatches nothing that the others do not.

    Args:
        loop: of the engine that the leader drives.
        party: the hosts.
        digest: of the weights that this host has loaded; those of all hosts must be equal.
    """

    def __init__(self, loop: StepLoop, party: HostGroup, digest: str) -> None:
        self._party, self._digest, self._number = party, digest, 0
        loop.followers = self

    def wait_until_ready(self) -> None:
        """Returns when every host has loaded the same weights and compiled its programs; otherwise all hosts end."""
        self._party.tell(Kind.READY)
        for host, digest in self._party.wait_until_ready().items():
            if digest != self._digest:
                self._party.end(
                    f"host {host} has loaded other weights than host 0 (digest {digest[:8]} there, {self._digest[:8]} "
                    "on host 0); give all hosts the same files, or the same --model and --revision",
                    code=2,
                )

    def call(self, batch: Batch) -> None:
        """The next call for all followers; the loop dispatches it right after."""
        self._party.tell(Kind.CALL, *to_bytes(self._number, batch))
        self._number += 1

    def step_failed(self, error: BaseException) -> NoReturn:
        """Ends all hosts: a lost store cannot be made again on all of them in step."""
        self._party.step_failed(error)

    def done(self) -> None:
        """Lets the followers go."""
        self._party.tell(Kind.DONE)
