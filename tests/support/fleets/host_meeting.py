"""A host that only meets the others: `python -m tests.support.fleets.host_meeting JSON`.

It prints the name of each stage that it reaches, and waits for a line on standard input at the first one, `started`,
so that all hosts begin together however long their imports take, and at the stage `stop`. After a line at the end, it
ends in order.
"""

import json
import logging
import sys

import jax
from jax.experimental import multihost_utils

from serving.hosts import meeting
from serving.hosts.settings import HostSettings


def main(job: dict) -> None:
    """`job`: fields of `HostSettings`, `stop`, and `grace`, the seconds after `meeting_timeout`."""
    stop = job.pop("stop", None)
    meeting._GRACE = job.pop("grace", meeting._GRACE)

    def reach(stage: str) -> None:
        print(stage, flush=True)
        if stage in ("started", stop):
            sys.stdin.readline()

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
    after(meeting, "_broadcast", "invited")
    reach("started")
    settings = HostSettings.create(**job)
    logging.basicConfig(format="%(message)s")
    group = meeting.meet(settings, {})
    reach("met")
    sys.stdin.readline()
    group.exit()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
