"""Waits for peers are bounded: for silent peers, slow peers, and peers that drop packets."""

import asyncio
import socket
import struct
import threading
import time
from functools import partial

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fastapi import APIRouter, FastAPI

from serving.api.http import errors
from serving.split import transports
from serving.split.http.peer import HttpPeer, SealAuth
from serving.split.http.routes import sealed
from serving.split.seal import HEADER as HEADER_OF_SEALS
from serving.split.seal import Seal, SealChecker
from serving.split.transports import TcpTransport, TransportError
from serving.split.wire import SplitError, SplitTimeout
from tests.serving.split.test_handshake import WANT
from tests.serving.split.test_manifest import BASE
from tests.support.servers.listener import listener
from tests.support.waiting import comes_true

ARRAYS = [jnp.arange(6000.0).reshape(3, 2000)]
SPECS = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
HEADER = transports._header(SPECS)


def drip(content, connection):
    """Sends its content at 20 bytes a second, and then nothing more."""
    for byte in content:
        connection.sendall(bytes([byte]))
        time.sleep(0.05)
    time.sleep(60)


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"", "timed out"),
        (struct.pack("!I", len(HEADER)) + HEADER + bytes(24000), "timed out"),
        # A peer's sizes do not allocate memory.
        (struct.pack("!I", 0xFFFFFFFF) + b"x" * 100, "unexpected shapes"),
    ],
)
def test_a_fetch_ends_in_time(content, error):
    transport = TcpTransport()
    with listener(partial(drip, content)) as port:
        begin = time.monotonic()
        with pytest.raises(TransportError, match=error):
            transport.fetch(f"127.0.0.1:{port}", 1, SPECS, 0.7)
        assert time.monotonic() - begin < 30
    transport.close()


@pytest.mark.parametrize(
    "content", [b"", b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + b"x: y\r\n" * 1000]
)
async def test_an_answer_ends_in_time(content):
    with listener(partial(drip, content)) as port:
        begin = time.monotonic()
        with pytest.raises(SplitError, match="did not answer"):
            await HttpPeer.connect(f"http://127.0.0.1:{port}", BASE, timeout=0.2)
        client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")
        peer = HttpPeer(f"http://127.0.0.1:{port}", BASE, client, Seal())
        with pytest.raises(SplitTimeout):
            await asyncio.to_thread(peer.offer, WANT, 0.2)
        await peer.close()
        assert time.monotonic() - begin < 5


def test_a_slow_reader_is_not_served_for_ever(monkeypatch):
    monkeypatch.setattr(transports, "_SERVING", 0.5)
    monkeypatch.setattr(transports, "_KEY_SECONDS", 0.5)  # of the connection that sends nothing
    transport = TcpTransport()
    transport.offer(5, [jnp.zeros((8 << 20,), jnp.float32)])
    before = threading.active_count()
    host, port = transport.address.split(":")
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))) as slow:
        slow.sendall(struct.pack("!Q", 5))
        slow.recv(10)
        assert comes_true(lambda: threading.active_count() <= before, 10), "a reader is still being served"
    transport.close()


@pytest.mark.parametrize("place", [4 + len(HEADER) + 100, -10, -1, 6])
def test_a_flipped_bit_is_noticed(place):
    sender, receiver = TcpTransport(), TcpTransport()
    sender.offer(9, ARRAYS)

    def flip(connection):
        host, port = sender.address.split(":")
        with socket.create_connection((host, int(port))) as behind, connection:
            behind.sendall(connection.recv(8))
            content = bytearray(behind.makefile("rb").read())
            content[place] ^= 4
            connection.sendall(content)

    with listener(flip) as port:
        with pytest.raises(TransportError, match=r"damaged|unexpected shapes"):
            receiver.fetch(f"127.0.0.1:{port}", 9, SPECS, 10.0)
    sender.offer(9, ARRAYS)
    (whole,) = receiver.fetch(sender.address, 9, SPECS, 10.0)
    np.testing.assert_array_equal(whole, np.asarray(ARRAYS[0]))
    for each in (sender, receiver):
        each.close()


def test_a_seal_is_of_one_message_to_one_receiver_at_one_time():
    now = [1000.0]
    seal = Seal("0123456789abcdef", clock=lambda: now[0])
    checker, other = SealChecker(seal), SealChecker(seal)

    def made(receiver=checker.name):
        return seal.headers("/split/expect", b"body", receiver)[HEADER_OF_SEALS]

    header = made()
    assert not checker.holds(header, "/split/offer", b"body")
    assert not checker.holds(header, "/split/expect", b"other")
    assert not checker.holds("", "/split/expect", b"body")
    assert not checker.holds("nan:" + header.partition(":")[2], "/split/expect", b"body")
    assert not checker.holds(header.replace(checker.name, other.name), "/split/expect", b"body")
    assert not other.holds(header, "/split/expect", b"body"), "it was made for another receiver"
    assert not checker.holds(made(other.name), "/split/expect", b"body")
    strange = SealChecker(Seal("fedcba9876543210", clock=lambda: now[0]))
    assert not strange.holds(made(strange.name), "/split/expect", b"body")
    assert checker.holds(header, "/split/expect", b"body"), "what was refused has used nothing up"
    assert not checker.holds(header, "/split/expect", b"body"), "it has come before"
    late = made()
    now[0] += 61
    assert not checker.holds(late, "/split/expect", b"body")
    early, now[0] = made(), now[0] - 59
    assert checker.holds(early, "/split/expect", b"body")
    for passed in (59, 59):
        now[0] += passed
        assert not checker.holds(early, "/split/expect", b"body"), "a message from a clock ahead is replayed"
    now[0] += 300
    assert checker.holds(made(), "/split/expect", b"body")
    assert len(checker._seen) == 1, "what cannot be replayed any more is not remembered"
    assert Seal().headers("/split/expect", b"", "") == {}
    assert "0123456789abcdef" not in repr(seal)


@pytest.mark.parametrize("root", ["", "/models/one"])
def test_sealed_messages_pass_below_a_root_path_and_after_a_restart(root):
    """With --root-path every sealed message was once refused: its path was another one there."""
    seal, served = Seal("0123456789abcdef"), []

    def server():
        app = FastAPI()
        errors.install(app)
        app.state.context = None
        router = APIRouter(prefix="/split", dependencies=[sealed(seal)])
        router.add_api_route("/expect", lambda: served.append(1), methods=["POST"])
        app.include_router(router)
        return app

    async def ask(app, auth):
        transport = httpx.ASGITransport(app, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://worker{root}") as client:
            return (await client.post("/split/expect", content=b"body", auth=auth)).status_code

    auth, app = SealAuth(seal), server()
    assert [asyncio.run(ask(app, auth)) for _ in range(3)] == [200] * 3
    assert [asyncio.run(ask(server(), auth)) for _ in range(2)] == [200] * 2
    assert asyncio.run(ask(app, SealAuth(Seal("fedcba9876543210")))) == 401
    assert asyncio.run(ask(app, None)) == 401
    assert len(served) == 5
