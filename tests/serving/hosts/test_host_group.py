"""Who lives, and how all end: between threads, and with a process that is frozen."""

import contextlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from serving.config import ConfigError
from serving.hosts import host_group
from serving.hosts.host import Leader, follow
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind, Link, LinkError
from tests.serving.hosts.test_follower import follower_of
from tests.serving.hosts.test_link import sockets
from tests.serving.hosts.test_wire import VOCAB, builder

# That is how the threads of a lost host end here.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class Watched(HostGroup):
    """A host whose end can be waited for; a thread ends in the process's place."""

    def __init__(self, *args, **kwargs):
        self.ends = queue.Queue()
        super().__init__(*args, **kwargs)

    def end(self, line, *, code=1, error=None):
        self.ends.put((line, code))
        for link in self._links.values():
            with contextlib.suppress(LinkError):
                link.send(Kind.FAILED, line.encode())
            link.close()
        raise SystemExit

    def last_words(self):
        return self.ends.get(timeout=30)


@pytest.fixture
def pair():
    """The leader and a follower."""
    one, other = sockets()
    made = Watched(0, {1: Link(one, 5)}, host_timeout=2), Watched(1, {0: Link(other, 5)}, host_timeout=2)
    yield made
    for each in made:
        each.close()


def test_a_follower_runs_what_the_leader_sends_until_done(pair):
    loop, (built, _) = SimpleNamespace(followers=None), follower_of([])
    leader = Leader(loop, pair[0], built.digest)
    assert loop.followers is leader
    batches = list(builder().warm_up_batches(VOCAB))[:5]
    following = threading.Thread(target=follow, args=(built, pair[1]), daemon=True)
    following.start()
    leader.wait_until_ready()
    for batch in batches:
        leader.call(batch)
    leader.done()
    following.join(30)
    assert not following.is_alive()
    assert [type(batch) for batch in built.engine.loop.ran] == [type(batch) for batch in batches]
    for each in pair:
        each.close()
        assert each.ends.empty()


@pytest.fixture
def exits(monkeypatch):
    """Names of the threads that would have ended a process, and the codes."""
    found = queue.Queue()

    def leave(code):
        found.put((threading.current_thread().name, code))
        raise SystemExit

    monkeypatch.setattr(host_group, "_exit", leave)
    return found


def test_the_leader_ends_after_its_followers(pair, exits):
    """A follower that still compiles ends at once."""
    leader, follower = pair
    thread = threading.Thread(target=leader.exit, name="leader", daemon=True)
    thread.start()
    assert exits.get(timeout=30) == ("host-0", 0)
    assert exits.empty(), "it still waits"
    follower.close()
    assert exits.get(timeout=30) == ("leader", 0)
    assert leader.ends.empty()


@pytest.mark.parametrize("idle", [False, True])
def test_a_follower_that_does_not_end_is_named(pair, exits, idle):
    leader, follower = pair
    if idle:
        leader.tell(Kind.DONE)
    for link in leader._links.values():
        link.timeout = 0.5
    follower._closed.set()  # no more heartbeats
    threading.Thread(target=leader.exit, daemon=True).start()
    line, code = leader.last_words()
    assert line.startswith("host 1 is lost: it ")
    assert code == 1


def test_one_that_fails_says_why_to_all(pair):
    leader, follower = pair
    with pytest.raises(SystemExit), follower.ending_together((ConfigError,)):
        raise ConfigError("no such model")
    assert leader.last_words() == ("host 1: no such model", 1)
    assert follower.last_words() == ("host 1: no such model", 2)


def test_unexpected_messages_are_refused(pair):
    leader, follower = pair
    follower.tell(Kind.CALL, b"")
    assert leader.last_words()[0] == "host 1 sent an unexpected CALL message"


def test_a_follower_that_is_asked_to_end_asks_the_leader(pair):
    leader, follower = pair
    asked, before = threading.Event(), signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        follower.tell(Kind.LEAVE)
        assert asked.wait(30)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert leader.ends.empty()


FROZEN = """
import socket, sys, time
from serving.hosts.link import Kind, Link
from serving.hosts.host_group import HostGroup
group = HostGroup(1, {0: Link(socket.create_connection(("127.0.0.1", int(sys.argv[1]))), 5)}, host_timeout=30)
if sys.argv[2] == "serving":
    group.tell(Kind.READY)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("how", "stage", "wanted"),
    [
        (signal.SIGSTOP, "serving", "sent nothing for 2 s"),
        (signal.SIGKILL, "serving", "closed the connection"),
        pytest.param(signal.SIGSTOP, "loading", "sent nothing for 6 s", marks=pytest.mark.full),
    ],
)
def test_a_process_that_is_frozen_or_killed_is_lost(monkeypatch, how, stage, wanted):
    monkeypatch.setattr(host_group, "_LOADING_TIMEOUT", 6.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        command = [sys.executable, "-c", FROZEN, str(listening.getsockname()[1]), stage]
        other = subprocess.Popen(command)
        try:
            leader = Watched(0, {1: Link(listening.accept()[0], 5)}, host_timeout=2)
            if stage == "serving":
                leader.wait_until_ready()
            with pytest.raises(queue.Empty):
                leader.ends.get(timeout=2.3 if how == signal.SIGSTOP else 0.1)  # it says that it lives
            other.send_signal(how)
            assert leader.last_words() == (f"host 1 is lost: it {wanted}", 1)
        finally:
            other.kill()
            other.wait()
