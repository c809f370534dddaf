"""One connection: who may make it, and what may go over it."""

import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from serving.hosts import link as link_module
from serving.hosts.link import MAX_FRAME, Kind, Link, LinkError

KEY = b"k" * 32


def sockets():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        return one, listening.accept()[0]


@pytest.fixture
def pair():
    links = [Link(each, 5.0) for each in sockets()]
    yield links
    for each in links:
        each.close()


def greet(pair, key, other_key, host=3):
    """What both sides get, or what is raised."""

    def end(link, authenticate, *given):
        try:
            return authenticate(link, *given)
        except LinkError as error:
            link.close()
            return error

    with ThreadPoolExecutor(1) as pool:
        follower = pool.submit(end, pair[0], Link.authenticate_to_leader, key, host)
        return {"leader": end(pair[1], Link.authenticate_follower, other_key), "follower": follower.result(60)}


def test_both_know_the_key(pair):
    assert greet(pair, KEY, KEY) == {"leader": 3, "follower": None}
    pair[0].send(Kind.FACTS, b"{", b"}")
    pair[0].send(Kind.HEARTBEAT)
    assert pair[1].receive() == (Kind.FACTS, b"{}")
    assert pair[1].receive() == (Kind.HEARTBEAT, b"")


def test_a_wrong_key_is_no_way_in(pair):
    found = greet(pair, KEY, b"x" * 32)
    assert str(found["leader"]) == "has a wrong key"
    assert isinstance(found["follower"], LinkError)


def test_a_leader_must_know_the_key_too(pair, monkeypatch):
    proof = link_module._proof

    def forged(key, role, *rest):
        forges = role == b"leader" and threading.current_thread() is threading.main_thread()
        return bytes(32) if forges else proof(key, role, *rest)

    monkeypatch.setattr(link_module, "_proof", forged)
    assert str(greet(pair, KEY, KEY)["follower"]) == "has a wrong key"


@pytest.mark.parametrize(
    ("sent", "line"),
    [
        (b"", r"sent nothing for 0\.05 s"),
        (struct.pack(">BI", Kind.CALL, 100) + bytes(99), "sent nothing"),
        (None, "closed the connection"),
        (struct.pack(">BI", Kind.CALL, MAX_FRAME + 1), "sent a message of 67,108,865 bytes"),
        (struct.pack(">BI", 99, 0), "unknown message type 99"),
    ],
)
def test_what_is_no_frame_is_refused_in_time(pair, sent, line):
    pair[1].timeout = 0.05
    if sent is None:
        pair[0].close()
    else:
        pair[0]._socket.sendall(sent)
    with pytest.raises(LinkError, match=line):
        pair[1].receive()


@pytest.mark.parametrize(
    ("size", "line"), [(MAX_FRAME, "accepted nothing for"), (MAX_FRAME + 1, "more than 67,108,864")]
)
def test_sending_too_much_ends_in_time(pair, size, line):
    pair[0].timeout = 0.05
    with pytest.raises(LinkError, match=line):
        pair[0].send(Kind.CALL, bytes(size))
