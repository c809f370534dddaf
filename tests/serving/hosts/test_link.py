"""One connection: who may make it, and what may go over it."""

import socket
import struct
import threading

import pytest

from serving.hosts import link as link_module
from serving.hosts.link import MAX_FRAME, Kind, Link, LinkError

KEY = b"k" * 32


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    links = Link(one, 5.0), Link(other, 5.0)
    yield links
    for each in links:
        each.close()


def greet(pair, key, other_key, host=3):
    """What both sides get, or what is raised."""
    found = {}

    def follower():
        try:
            found["follower"] = pair[0].authenticate_to_leader(key, host)
        except LinkError as error:
            found["follower"] = error
            pair[0].close()

    thread = threading.Thread(target=follower)
    thread.start()
    try:
        found["leader"] = pair[1].authenticate_follower(other_key)
    except LinkError as error:
        found["leader"] = error
        pair[1].close()
    thread.join()
    return found


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
        return bytes(32) if role == b"leader" and threading.current_thread() is threading.main_thread() else proof(
            key, role, *rest
        )  # fmt: skip

    monkeypatch.setattr(link_module, "_proof", forged)
    assert str(greet(pair, KEY, KEY)["follower"]) == "has a wrong key"


def test_silence_has_an_end(pair):
    pair[1].timeout = 0.05
    with pytest.raises(LinkError, match=r"sent nothing for 0\.05 s"):
        pair[1].receive()


def test_half_a_frame_is_silence(pair):
    pair[1].timeout = 0.05
    pair[0]._socket.sendall(struct.pack(">BI", Kind.CALL, 100) + bytes(99))
    with pytest.raises(LinkError, match="sent nothing"):
        pair[1].receive()


def test_sending_to_a_host_that_reads_nothing_times_out(pair):
    pair[0].timeout = 0.05
    with pytest.raises(LinkError, match="accepted nothing for"):
        pair[0].send(Kind.CALL, bytes(MAX_FRAME))


def test_an_end_is_seen(pair):
    pair[0].close()
    with pytest.raises(LinkError, match="closed the connection"):
        pair[1].receive()


def test_frames_are_bounded_on_both_sides(pair):
    with pytest.raises(LinkError, match="more than 67,108,864"):
        pair[0].send(Kind.CALL, bytes(MAX_FRAME), b"1")
    pair[0]._socket.sendall(struct.pack(">BI", Kind.CALL, MAX_FRAME + 1))
    with pytest.raises(LinkError, match="sent a message of 67,108,865 bytes"):
        pair[1].receive()


def test_an_unknown_kind_is_refused(pair):
    pair[0]._socket.sendall(struct.pack(">BI", 99, 0))
    with pytest.raises(LinkError, match="unknown message type 99"):
        pair[1].receive()
