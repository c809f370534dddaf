"""How hosts find their leader, here between threads: only what JAX's collectives carry is played."""

import contextlib
import json
import logging
import queue
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from serving.config import ConfigError
from serving.hosts import meeting
from serving.hosts.link import Kind, Link
from serving.hosts.settings import HostSettings
from tests.support.fleets.processes import free_port
from tests.support.servers.listener import listener

FACTS = {"--page-size": "16", "the version of jax": "1"}


@pytest.fixture
def invitations(monkeypatch):
    """What the leader tells all hosts."""
    told = queue.Queue()

    def broadcast(invitation):
        if invitation is not None:
            for _ in range(10):
                told.put(invitation)
            return invitation
        return told.get(timeout=30)

    monkeypatch.setattr(meeting, "of_first_process", broadcast)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(meeting, "HostGroup", lambda host, links, host_timeout: (host, links))
    return told


class Hosts:
    """Hosts that meet, each in a thread; they end with groups or lines."""

    def __init__(self, numbers, *, seconds=20, facts=None):
        pool, facts = ThreadPoolExecutor(len(numbers)), facts or {}
        self.ends = [pool.submit(self.meet, number, seconds, facts.get(number, FACTS)) for number in numbers]

    def meet(self, number, seconds, facts):
        settings = HostSettings.create(coordinator="127.0.0.1:1", num_hosts=9, host_id=number, meeting_timeout=seconds)
        try:
            return meeting.connect_hosts(settings, facts, time.monotonic() + seconds)
        except ConfigError as error:
            return str(error)

    def all_meet(self):
        """Whether hosts 1 and 2, which start now, and the leader find each other."""
        assert [host for host, _ in Hosts([1, 2]).wait()] == [1, 2]
        ((host, links),) = self.wait()
        return (host, sorted(links)) == (0, [1, 2])

    def wait(self):
        found = [end.result(60) for end in self.ends]
        for each in found:
            if not isinstance(each, str):
                for link in each[1].values():
                    link.close()
        return found


def test_hosts_that_were_started_otherwise_say_in_what(invitations):
    found = Hosts([0, 1], facts={1: FACTS | {"--page-size": "32"}}).wait()
    line = "the hosts did not connect: host 1 has another configuration: --page-size is 32 there, 16 on host 0"
    assert found == [line, line]


@contextlib.contextmanager
def dripping(connections, count=1):
    """The first `count` connections send a byte now and then. All are closed in the end."""
    done = threading.Event()

    def drip():
        while not done.wait(0.2):
            for each in connections[:count]:
                with contextlib.suppress(OSError):
                    each.sendall(b"x")

    thread = threading.Thread(target=drip, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(60)
        for each in connections:
            each.close()


def test_connections_that_are_slow_silent_or_without_the_key_do_not_delay_the_hosts(invitations):
    """A byte now and then once held the meeting for as long as it lasted, and 20 silent connections made it fail."""
    hosts = Hosts([0], seconds=30)
    address = ("127.0.0.1", invitations.get(timeout=30)["port"])
    slow = [socket.create_connection(address) for _ in range(30)]
    with dripping(slow, 5), socket.create_connection(address) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n" * 10)
        liar = Link(socket.create_connection(address), 5)
        with pytest.raises(meeting.LinkError):
            liar.authenticate_to_leader(b"x" * 32, 1)
        assert hosts.all_meet()


def test_a_greeting_has_one_deadline(monkeypatch):
    monkeypatch.setattr("serving.hosts.link._HANDSHAKE_TIMEOUT", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        error = pytest.raises(meeting.LinkError, match=r"did not authenticate within 1 s|sent nothing")
        with dripping([socket.create_connection(listening.getsockname())]), error:
            Link(listening.accept()[0], 60).authenticate_follower(b"k" * 32)


@pytest.mark.parametrize(("place", "bound"), [("127.0.0.1", "127.0.0.1"), (None, "::"), ("192.0.2.1", "::")])
def test_the_meeting_listens_at_the_coordinators_address(place, bound):
    with meeting.listening_at(place, 0) as listening:
        assert listening.getsockname()[0] in (bound, "0.0.0.0" if bound == "::" else bound)


def test_a_name_that_only_this_host_takes_for_loopback_is_listened_to_everywhere(monkeypatch):
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *given, **options: found)
    with meeting.listening_at("node001", 0) as listening:
        assert listening.getsockname()[0] in ("::", "0.0.0.0")


def test_missing_hosts_are_named_again_and_again_on_all_hosts(invitations, monkeypatch, caplog):
    monkeypatch.setattr(meeting, "REPORT_INTERVAL", 0.05)
    with caplog.at_level(logging.INFO):
        found = Hosts([0, 2], seconds=1).wait()
    line = "the hosts did not connect: host 1 did not connect in time: not started, not reachable, or ended"
    assert found == [line] * 2
    for said in ("waiting for host 1", "host 0: waiting for host 1"):
        assert sum(record.getMessage() == said for record in caplog.records) > 2


def test_a_host_that_is_restarted_while_another_one_is_missing_comes_again(invitations, monkeypatch):
    monkeypatch.setattr(meeting, "REPORT_INTERVAL", 0.1)
    leader = Hosts([0])
    invitation = invitations.get(timeout=30)
    first = Link(socket.create_connection(("127.0.0.1", invitation["port"])), 5)
    first.authenticate_to_leader(bytes.fromhex(invitation["key"]), 1)
    first.send(Kind.FACTS, json.dumps(FACTS).encode())
    first.receive()  # it waits for host 2
    first.close()
    assert leader.all_meet()


@pytest.fixture
def ends(monkeypatch):
    """Lines and codes with which the process would have exited."""
    found = queue.Queue()

    def end(line, code):
        found.put((line, code))
        raise SystemExit

    monkeypatch.setattr(meeting, "_end", end)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_meeting_that_lasts_too_long_ends_the_process(ends, monkeypatch, caplog):
    """JAX's runtime waited on in silence, and then aborted the process."""
    monkeypatch.setattr(meeting, "_GRACE", -0.5)
    monkeypatch.setattr(meeting, "REPORT_INTERVAL", 0.1)
    caplog.set_level(logging.INFO)
    with meeting.connect_deadline(HostSettings.create(meeting_timeout=1)):
        line, code = ends.get(timeout=30)
    assert line.startswith("the hosts did not connect within 1 s: a host was not started")
    assert sum("which only JAX's runtime knows" in record.getMessage() for record in caplog.records) > 1
    assert code == 1


@pytest.mark.parametrize(
    ("error", "expected"),
    [(ConfigError("the hosts did not connect: host 1 is late"), 2), (RuntimeError("Gloo failed:\n closed"), 1)],
)
def test_a_meeting_that_fails_ends_the_process(ends, error, expected):
    with pytest.raises(SystemExit), meeting.connect_deadline(HostSettings.create()):
        raise error
    line, code = ends.get(timeout=30)
    assert line.startswith("the hosts did not connect: ")
    assert "\n" not in line
    assert code == expected


def test_an_error_before_the_meeting_is_raised(ends, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: False)
    with pytest.raises(ConfigError), meeting.connect_deadline(HostSettings.create()):
        raise ConfigError("the environment names no hosts")
    assert ends.empty()


@pytest.mark.parametrize("number", [1, 8])
def test_a_number_that_is_taken_or_wrong_is_refused_and_the_others_meet(invitations, number):
    leader, first = Hosts([0]), Hosts([1])
    time.sleep(0.5)
    assert Hosts([number]).wait() == [f"the hosts did not connect: duplicate or invalid --host-id {number}"]
    assert [host for host, _ in Hosts([2]).wait() + first.wait() + leader.wait()] == [2, 1, 0]


def test_a_second_process_does_not_reach_the_coordinator_of_a_group_that_runs(monkeypatch):
    """JAX's coordinator greets as an HTTP/2 server; a second host of the same number would abort all hosts."""
    monkeypatch.setattr(meeting, "_RUNNING_PATIENCE", 0.5)

    def greets(connection):
        connection.sendall(bytes.fromhex("00001804000000000000040040000000050040000000060000400000"))
        assert connection.recv(1) == b""

    with listener(greets) as port:
        settings = HostSettings.create(coordinator=f"127.0.0.1:{port}", num_hosts=2, host_id=1)
        with pytest.raises(ConfigError, match="already run; is --host-id 1 taken"):
            with meeting.roll_call(settings, FACTS, time.monotonic() + 60):
                pass


def test_the_roll_call_is_over_when_all_hosts_have_met():
    port = free_port()

    def meet(number):
        settings = HostSettings.create(coordinator=f"127.0.0.1:{port}", num_hosts=3, host_id=number)
        with meeting.roll_call(settings, FACTS, time.monotonic() + 30):
            return number

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(meet, range(3), timeout=60)) == [0, 1, 2]
