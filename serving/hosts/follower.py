"""A host that schedules nothing: it dispatches the leader's calls over its own part of the mesh."""

from __future__ import annotations

from typing import Any

import jax

from mamba_jax.program_cache import look_of
from serving.engine.assembly.build import AssembledEngine
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind
from serving.hosts.wire import WireError, from_bytes


def follow(built: AssembledEngine, party: HostGroup) -> None:
    """Does what the leader does, until it is done; a call that cannot be followed ends all hosts.

    Args:
        built: made from the same flags as the leader's; its scheduler is not used.
        party: of which we are not the leader.
    """
    loop, vocab_size = built.engine.loop, built.engine.vocab_size
    known = {look_of(batch) for batch in loop.batches.warm_up_batches(vocab_size)}
    party.tell(Kind.READY, built.digest.encode())
    before: Any = None
    for expected, message in enumerate(party.calls()):
        try:
            number, batch = from_bytes(message)
        except WireError as error:
            party.end(f"host {party.host} does not understand call {expected} of host 0: {error}")
        if number != expected:
            party.end(f"host {party.host} was sent call {number} of host 0, not {expected}")
        if look_of(batch) not in known:
            party.end(f"host {party.host} has no program for call {number} of host 0, a {type(batch).__name__}")
        try:
            output = loop.run(batch)
            if output is not None:
                # As the leader: one step ahead of what is known to have worked.
                jax.block_until_ready(before)
                before = output
        except Exception as error:
            party.step_failed(error)
