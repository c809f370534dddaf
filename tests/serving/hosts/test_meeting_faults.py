"""Hosts that are killed or frozen before all have met: the leader exits with one line, in time."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.processes import free_port

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
SECONDS, GRACE = 8, 2
LATE = "the hosts did not connect within 8 s: a host was not started, cannot be reached or has ended"


class Meeting:
    """Processes of `host_meeting`; the one numbered 1 stops at a stage."""

    def __init__(self, folder, stage, *, hosts=2, started=2):
        port, self.log = free_port(), folder / "leader.log"
        self.processes = []
        for host in range(started):
            job = {"coordinator": f"127.0.0.1:{port}", "num_hosts": hosts, "host_id": host, "grace": GRACE}
            job |= {"meeting_timeout": SECONDS} | ({"stop": stage} if host == 1 else {})
            with (self.log if host == 0 else folder / f"host-{host}.log").open("w") as log:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "tests.support.host_meeting", json.dumps(job)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
                    )
                )
        for host in range(started):
            self.reach("started", host)
        for process in self.processes[: 1 if stage == "started" else None]:
            process.stdin.write("\n")
            process.stdin.flush()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    def reach(self, stage, host=1):
        """Waits until a host is there."""
        for line in self.processes[host].stdout:
            if line.strip() == stage:
                return
        self.__exit__()  # the constructor waits too, and a `with` statement has not entered then
        raise AssertionError(f"host {host} has ended")

    def leader_ends(self):
        """Its exit status and its log."""
        return self.processes[0].wait(120), self.log.read_text()


def test_a_host_that_was_not_started(tmp_path):
    with Meeting(tmp_path, None, started=1) as hosts:
        status, log = hosts.leader_ends()
    assert (status, LATE in log) == (1, True), log


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("stage", ["started", "joined", "counted", "invited"])
def test_a_host_that_ends_before_the_meeting(stage, how, tmp_path):
    """Once the leader waited for a minute and more, and was then aborted by JAX."""
    with Meeting(tmp_path, stage) as hosts:
        if stage != "started":
            hosts.reach(stage)
        hosts.processes[1].send_signal(how)
        status, log = hosts.leader_ends()
    assert status in (1, 2), log
    if stage in ("started", "joined"):
        assert LATE in log
    else:
        assert "the hosts did not connect" in log


def test_a_host_that_ends_while_another_one_is_missing(tmp_path):
    with Meeting(tmp_path, None, hosts=3) as hosts:
        time.sleep(3)  # it connects to JAX's runtime
        hosts.processes[1].kill()
        status, log = hosts.leader_ends()
    assert (status, LATE in log) == (1, True), log
