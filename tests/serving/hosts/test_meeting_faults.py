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

from tests.support.fleets.processes import free_port

pytestmark = pytest.mark.full

ROOT = Path(__file__).resolve().parents[3]
SECONDS, GRACE = 8, 2
MISSING = "host 1 did not connect in time"
LATE = "the hosts did not connect within 8 s: a host was not started, cannot be reached or has ended"


class Meeting:
    """Processes of `host_meeting`; the one numbered 1 stops at a stage."""

    def __init__(self, folder, stage, *, hosts=2, started=2):
        self.port, self.hosts, self.folder, self.log = free_port(), hosts, folder, folder / "host-0.log"
        self.processes = [self.start(host, stage if host == 1 else None, f"host-{host}") for host in range(started)]
        for host in range(started):
            self.reach("started", host)
        for process in self.processes[: 1 if stage == "started" else None]:
            self.go_on(process)

    def start(self, host, stage, name):
        job = {"coordinator": f"127.0.0.1:{self.port}", "num_hosts": self.hosts, "host_id": host, "grace": GRACE}
        job |= {"meeting_timeout": SECONDS, "stop": stage}
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "tests.support.fleets.host_meeting", json.dumps(job)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)

    @staticmethod
    def go_on(process):
        process.stdin.write("\n")
        process.stdin.flush()

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
    assert status in (1, 2)
    assert MISSING in log


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
@pytest.mark.parametrize("stage", ["started", "called", "joined", "counted", "invited"])
def test_a_host_that_ends_before_the_meeting(stage, how, tmp_path):
    """Once the leader waited for a minute and more, and was then aborted by JAX."""
    with Meeting(tmp_path, stage) as hosts:
        if stage != "started":
            hosts.reach(stage)
        hosts.processes[1].send_signal(how)
        status, log = hosts.leader_ends()
    assert status in (1, 2), log
    if stage == "started":
        assert MISSING in log
    elif how == signal.SIGKILL:
        assert "host 1 is lost: it closed the connection" in log
    else:
        assert LATE in log or "host 1" in log


@pytest.mark.parametrize("frozen", [False, True])
def test_an_orderly_end_is_no_abort(tmp_path, frozen):
    """Also of a follower that does something else, or nothing; JAX's shutdown aborted all processes."""
    with Meeting(tmp_path, None) as hosts:
        for host in (0, 1):
            hosts.reach("met", host)
        if frozen:
            hosts.processes[1].send_signal(signal.SIGSTOP)
        hosts.go_on(hosts.processes[0])
        status, log = hosts.leader_ends()
        assert (status, "host 1 is lost: it " in log) == (int(frozen), frozen), log
        if not frozen:
            assert hosts.processes[1].wait(10) == 0


def test_a_second_process_of_a_number_is_refused_and_the_group_goes_on(tmp_path):
    with Meeting(tmp_path, None) as hosts:
        for host in (0, 1):
            hosts.reach("met", host)
        twin = hosts.start(1, None, "twin")
        hosts.go_on(twin)
        assert twin.wait(60) != 0
        assert "already run; is --host-id 1 taken" in (tmp_path / "twin.log").read_text()
        assert [process.poll() for process in hosts.processes] == [None, None]


def test_a_host_that_ends_while_another_one_is_missing(tmp_path):
    with Meeting(tmp_path, None, hosts=3) as hosts:
        time.sleep(3)  # it answers the roll call
        hosts.processes[1].kill()
        status, log = hosts.leader_ends()
    assert status in (1, 2)
    assert "hosts 1, 2 did not connect in time" in log
