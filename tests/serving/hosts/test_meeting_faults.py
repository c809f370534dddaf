"""Hosts that are killed or frozen before all have met: the leader exits with one line, in time."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.support.fleets.host_meeting import main
from tests.support.fleets.processes import free_port
from tests.support.selection import slow
from tests.support.waiting import comes_true

pytestmark = pytest.mark.full

SECONDS, GRACE = 8, 2
LATE = "the hosts did not connect within 8 s: a host was not started, cannot be reached or has ended"
FORKED = multiprocessing.get_context("forkserver")


@pytest.fixture(scope="module", autouse=True)
def server():
    """A process that has imported JAX, of which all hosts are forks: importing takes longer than a meeting."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_PLATFORMS", "cpu")
        FORKED.set_forkserver_preload([main.__module__])
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()


class Meeting(contextlib.ExitStack):
    """Processes of `host_meeting`; the one numbered 1 stops at a stage."""

    def __init__(self, folder, stage):
        super().__init__()
        self.port, self.folder, self.log = free_port(), folder, folder / "host-0.log"
        self.processes, self.pipes = [], []
        for host in (0, 1):
            self.start(stage if host == 1 else None, f"host-{host}", host)
        for host in (0, 1):
            self.reach("started", host)
        for host in (0,) if stage == "started" else (0, 1):
            self.pipes[host].send(None)

    def start(self, stage, name, host):
        job = {"coordinator": f"127.0.0.1:{self.port}", "num_hosts": 2, "host_id": host, "grace": GRACE}
        job |= {"meeting_timeout": SECONDS, "stop": stage}
        pipe, theirs = FORKED.Pipe()
        process = FORKED.Process(target=main, args=(theirs, str(self.folder / f"{name}.log"), job), daemon=True)
        process.start()
        theirs.close()
        self.callback(process.join, 10)
        self.callback(process.kill)
        self.processes.append(process)
        self.pipes.append(pipe)

    def reach(self, stage, host=1):
        """Waits until a host is there."""
        try:
            found = None
            while found != stage and self.pipes[host].poll(120):
                found = self.pipes[host].recv()
            assert found == stage, f"host {host} is not there after 120 s"
        except (EOFError, ConnectionError):
            self.close()  # the constructor waits too, and a `with` statement has not entered then
            raise AssertionError(f"host {host} has ended") from None

    def leader_ends(self):
        """Its exit status and its log."""
        self.processes[0].join(120)
        return self.processes[0].exitcode, self.log.read_text()


STAGES = ("started", "called", "joined", "counted", "invited")


@pytest.mark.parametrize(
    ("stage", "how"),
    [
        *((stage, "SIGKILL") for stage in STAGES),
        *(slow(stage, "SIGSTOP") if stage in ("called", "counted") else (stage, "SIGSTOP") for stage in STAGES),
    ],
)
def test_a_host_that_ends_before_the_meeting(stage, how, tmp_path):
    """Once the leader waited for a minute and more, and was then aborted by JAX."""
    with Meeting(tmp_path, stage) as hosts:
        if stage != "started":
            hosts.reach(stage)
        os.kill(hosts.processes[1].pid, getattr(signal, how))
        status, log = hosts.leader_ends()
    assert status in (1, 2), log
    if stage == "started":
        assert "host 1 did not connect in time" in log
    elif how == "SIGKILL":
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
            os.kill(hosts.processes[1].pid, signal.SIGSTOP)
            state = Path(f"/proc/{hosts.processes[1].pid}/stat")  # on a busy machine, a thread may go on for a moment
            assert comes_true(lambda: state.read_text().rpartition(")")[2].split()[0] == "T")
        hosts.pipes[0].send(None)
        status, log = hosts.leader_ends()
        assert (status, "host 1 is lost: it " in log) == (int(frozen), frozen), log
        if not frozen:
            hosts.processes[1].join(10)
            assert hosts.processes[1].exitcode == 0


def test_a_second_process_of_a_number_is_refused_and_the_group_goes_on(tmp_path):
    with Meeting(tmp_path, None) as hosts:
        for host in (0, 1):
            hosts.reach("met", host)
        hosts.start(None, "twin", 1)
        hosts.pipes[2].send(None)
        hosts.processes[2].join(60)
        assert hosts.processes[2].exitcode
        assert "already run; is --host-id 1 taken" in (tmp_path / "twin.log").read_text()
        assert all(process.is_alive() for process in hosts.processes[:2])
