"""The calls that all hosts make in step: the leader sends each batch before it dispatches it, followers repeat it."""

from __future__ import annotations

from typing import Any, NoReturn

import jax

from mamba_jax.program_cache import look_of
from mamba_jax.programs import Batch
from serving.engine.assembly.build import AssembledEngine
from serving.engine.steps.loop import StepLoop
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind
from serving.hosts.wire import WireError, from_bytes, to_bytes


class Leader:
    """A loop's `followers`. From its making on, the loop dispatches nothing that the others do not.

    Args:
        loop: of the engine that the leader drives.
        group: the hosts.
        digest: of the weights that this host has loaded; those of all hosts must be equal.
    """

    def __init__(self, loop: StepLoop, group: HostGroup, digest: str) -> None:
        self._group, self._digest, self._number = group, digest, 0
        loop.followers = self

    def wait_until_ready(self) -> None:
        """Returns when every host has loaded the same weights and compiled its programs; otherwise all hosts end."""
        self._group.tell(Kind.READY)
        for host, digest in self._group.wait_until_ready().items():
            if digest != self._digest:
                self._group.end(
                    f"host {host} has loaded other weights than host 0 (digest {digest[:8]} there, {self._digest[:8]} "
                    "on host 0); give all hosts the same files, or the same --model and --revision",
                    code=2,
                )

    def call(self, batch: Batch) -> None:
        """The next call for all followers; the loop dispatches it right after."""
        self._group.tell(Kind.CALL, *to_bytes(self._number, batch))
        self._number += 1

    def step_failed(self, error: BaseException) -> NoReturn:
        """Ends all hosts: a lost store cannot be made again on all of them in step."""
        self._group.step_failed(error)

    def done(self) -> None:
        """Lets the followers go."""
        self._group.tell(Kind.DONE)


def follow(built: AssembledEngine, group: HostGroup) -> None:
    """Does what the leader does, until it is done; a call that cannot be followed ends all hosts.

    Args:
        built: made from the same flags as the leader's; its scheduler is not used.
        group: of which we are not the leader.
    """
    loop, vocab_size = built.engine.loop, built.engine.vocab_size
    known = {look_of(batch) for batch in loop.batches.warm_up_batches(vocab_size)}
    group.tell(Kind.READY, built.digest.encode())
    before: Any = None
    for expected, message in enumerate(group.calls()):
        try:
            number, batch = from_bytes(message)
        except WireError as error:
            group.end(f"host {group.host} cannot read call {expected} of host 0: {error}")
        if number != expected:
            group.end(f"host {group.host} received call {number} of host 0, expected {expected}")
        if look_of(batch) not in known:
            group.end(f"host {group.host} has no program for call {number} of host 0, a {type(batch).__name__}")
        try:
            output = loop.run(batch)
            if output is not None:
                # As the leader: one step ahead of what is known to have worked.
                jax.block_until_ready(before)
                before = output
        except Exception as error:
            group.step_failed(error)
