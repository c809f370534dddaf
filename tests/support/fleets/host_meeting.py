"""A host that only meets the others, in a process that is forked from one with all imports done.

It sends the name of each stage that it reaches, and waits for a message at the first one, `started`, so that all hosts
begin together, and at the stage `stop`. After a message at the end, it ends in order.
"""

import logging
import os
from multiprocessing.connection import Connection

import jax
from jax.experimental import multihost_utils

from serving.hosts import meeting
from serving.hosts.settings import HostSettings


def main(pipe: Connection, log: str, job: dict) -> None:
    """`log`: a file in the place of the process's stderr. `job`: fields of `HostSettings`, `stop`, and `grace`, the
    seconds after `meeting_timeout`."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 2)
    stop = job.pop("stop", None)
    meeting._GRACE = job.pop("grace", meeting._GRACE)

    def reach(stage: str) -> None:
        pipe.send(stage)
        if stage in ("started", stop):
            pipe.recv()

    def after(where, name: str, stage: str) -> None:
        original = getattr(where, name)

        def wrapped(*arguments, **named):
            result = original(*arguments, **named)
            reach(stage)
            return result

        setattr(where, name, wrapped)

    after(meeting, "connect_to_leader", "called")
    after(jax.distributed, "initialize", "joined")
    after(multihost_utils, "process_allgather", "counted")
    after(meeting, "of_first_process", "invited")
    reach("started")
    settings = HostSettings.create(**job)
    logging.basicConfig(format="%(message)s")
    group = meeting.meet(settings, {})
    reach("met")
    pipe.recv()
    group.exit()
