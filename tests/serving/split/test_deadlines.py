"""Nobody waits for a peer for ever: not for one that is silent, nor for one that drips, nor for a black hole."""

import asyncio
import socket
import struct
import threading
import time
import zlib

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.split.http.peer import HttpPeer
from serving.split.seal import Seal
from serving.split.transport import TcpTransport, TransportError
from serving.split.transport import tcp as tcp_module
from serving.split.wire import SplitError, SplitTimeout
from tests.serving.split.test_handshake import WANT
from tests.serving.split.test_manifest import BASE
from tests.support.listener import listener

ARRAYS = [jnp.arange(6000.0).reshape(3, 2000)]
SPECS = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]
HEADER = tcp_module._header(SPECS)


def drip(content: bytes):
    """Sends its content at 20 bytes a second."""

    def serve(connection):
        for byte in content:
            connection.sendall(bytes([byte]))
            time.sleep(0.05)
        time.sleep(60)

    return serve


def silent(connection):
    time.sleep(60)


@pytest.mark.parametrize("serve", [silent, drip(struct.pack("!I", len(HEADER)) + HEADER + bytes(24000))])
def test_a_fetch_ends_in_time(serve):
    transport = TcpTransport()
    with listener(serve) as port:
        begin = time.monotonic()
        with pytest.raises(TransportError):
            transport.fetch(f"127.0.0.1:{port}", 1, SPECS, 0.7)
        assert time.monotonic() - begin < 3
    transport.close()


@pytest.mark.parametrize(
    "serve", [silent, drip(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" + b"x: y\r\n" * 1000)]
)
def test_an_answer_ends_in_time(serve):
    async def run(port):
        with pytest.raises(SplitError, match="not answered"):
            await HttpPeer.connect(f"http://127.0.0.1:{port}", BASE, timeout=0.5)
        peer = HttpPeer(f"http://127.0.0.1:{port}", BASE, _client(port), Seal())
        with pytest.raises(SplitTimeout):
            await asyncio.to_thread(peer.offer, WANT, 0.5)
        await peer.close()

    with listener(serve) as port:
        begin = time.monotonic()
        asyncio.run(run(port))
        assert time.monotonic() - begin < 5


def _client(port):
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}")


def test_a_slow_reader_is_not_served_for_ever(monkeypatch):
    monkeypatch.setattr(tcp_module, "_SERVING", 0.5)
    transport = TcpTransport()
    big = jnp.zeros((8 << 20,), jnp.float32)
    transport.offer(5, [big])
    before = threading.active_count()
    host, port = transport.address.split(":")
    with socket.create_connection((host, int(port))) as idle, socket.create_connection((host, int(port))) as slow:
        slow.sendall(struct.pack("!Q", 5))
        slow.recv(10)
        end = time.monotonic() + 10
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.05)
        assert threading.active_count() <= before, "somebody is still being served"
        del idle
    transport.close()


# -- damage and lies --


class Twisted:
    """Between two transports: changes what passes."""

    def __init__(self, address, change):
        self._address, self._change = address, change

    def __call__(self, connection):
        host, port = self._address.split(":")
        with socket.create_connection((host, int(port))) as behind:
            behind.sendall(connection.recv(8))
            content = bytearray()
            while piece := behind.recv(1 << 16):
                content += piece
            self._change(content)
            connection.sendall(content)
            connection.close()


@pytest.mark.parametrize("place", [4 + len(HEADER) + 100, -10, -1, 6])
def test_a_flipped_bit_is_noticed(place):
    sender, receiver = TcpTransport(), TcpTransport()
    sender.offer(9, ARRAYS)

    def flip(content):
        content[place] ^= 4

    with listener(Twisted(sender.address, flip)) as port:
        with pytest.raises(TransportError, match=r"damaged|other arrays"):
            receiver.fetch(f"127.0.0.1:{port}", 9, SPECS, 10.0)
    sender.offer(9, ARRAYS)
    (whole,) = receiver.fetch(sender.address, 9, SPECS, 10.0)
    np.testing.assert_array_equal(whole, np.asarray(ARRAYS[0]))
    for each in (sender, receiver):
        each.close()


def test_nothing_is_allocated_on_a_strangers_word():
    def lies(connection):
        connection.sendall(struct.pack("!I", 0xFFFFFFFF) + b"x" * 100)
        time.sleep(5)

    transport = TcpTransport()
    with listener(lies) as port:
        begin = time.monotonic()
        with pytest.raises(TransportError, match="other arrays"):
            transport.fetch(f"127.0.0.1:{port}", 1, SPECS, 10.0)
        assert time.monotonic() - begin < 2
    transport.close()
    assert zlib.crc32(b"") == 0  # of an array without elements


def test_a_seal_is_of_one_message_at_one_time():
    now = [1000.0]
    seal = Seal("0123456789abcdef", clock=lambda: now[0])
    (header,) = seal.headers("/split/expect", b"body").values()
    assert seal.holds(header, "/split/expect", b"body")
    assert not seal.holds(header, "/split/offer", b"body")
    assert not seal.holds(header, "/split/expect", b"other")
    assert not seal.holds("", "/split/expect", b"body")
    assert not seal.holds("nan:" + header.partition(":")[2], "/split/expect", b"body")
    assert not Seal("fedcba9876543210", clock=lambda: now[0]).holds(header, "/split/expect", b"body")
    now[0] += 61
    assert not seal.holds(header, "/split/expect", b"body")
    assert Seal().headers("/split/expect", b"") == {}
    assert "0123456789abcdef" not in repr(seal)
