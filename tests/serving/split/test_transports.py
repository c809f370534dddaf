"""Arrays go from one server to another, or it is said in time that they do not."""

import contextlib
import ctypes
import socket
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.split import transports
from serving.split.transports import JaxTransport, TcpTransport, TransportError
from tests.support.waiting import comes_true

ARRAYS = [jnp.arange(60.0).reshape(3, 20), jnp.ones((2, 3), jnp.bfloat16) * 3, jnp.zeros((0, 4))]
SPECS = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]


@pytest.fixture(scope="module", params=[TcpTransport, JaxTransport])
def pair(request):
    try:
        made = request.param(), request.param()
    except TransportError as error:
        pytest.skip(str(error))
    yield made
    for each in made:
        each.close()


def test_arrays_arrive_as_they_are(pair):
    sender, receiver = pair
    for key in (1, 2):
        sender.offer(key, ARRAYS)
    for key in (2, 1):
        for sent, got in zip(ARRAYS, receiver.fetch(sender.address, key, SPECS, 20.0), strict=True):
            assert got.dtype == sent.dtype
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(sent, np.float32))


def test_nothing_offered_or_no_sender_is_an_error_in_time(pair):
    sender, receiver = pair
    for address in (sender.address, "127.0.0.1:9"):  # nothing listens at the other one
        begin = time.monotonic()
        with pytest.raises(TransportError):
            receiver.fetch(address, 77, SPECS, 0.3)
        assert time.monotonic() - begin < 5
    # And the connection still serves.
    sender.offer(78, ARRAYS)
    assert len(receiver.fetch(sender.address, 78, SPECS, 20.0)) == len(ARRAYS)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs Linux's /proc")
def test_what_never_comes_takes_no_descriptors(pair):
    sender, receiver = pair
    before = None
    for key in range(100, 112):
        with pytest.raises(TransportError):
            receiver.fetch(sender.address, key, SPECS, 0.02)
        if key == 103:
            before = len(list(Path("/proc/self/fd").iterdir()))
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_draining_takes_no_memory(pair):
    """Offers of 4 MiB, of which 60 would be 240 MiB, and as much again where they are drained all at once."""
    sender, _ = pair
    block = jnp.zeros((1 << 20,))

    def drain(first: int, count: int) -> None:
        for key in range(first, first + count):
            sender.offer(key, [block + key])
            sender.drain(key)
            sender.drain(key)

    drain(1000, 3)
    time.sleep(0.5)
    before = _resident()
    drain(2000, 60)
    released = comes_true(lambda: _resident() - before <= 100 << 20, 30, 0.1)
    assert released, f"{(_resident() - before) >> 20} MiB more"


def test_the_end_does_not_wait_for_each_offer(pair):
    """One that was fetched and never drained cannot be discarded: each held up the end of the process for 10 s."""
    sender, receiver = type(pair[0])(), pair[1]
    for key in (1, 2, 3):
        sender.offer(key, ARRAYS)
        receiver.fetch(sender.address, key, SPECS, 20.0)
    begin = time.monotonic()
    sender.close()
    if isinstance(sender, JaxTransport):
        sender._drains.shutdown(wait=True)
    assert time.monotonic() - begin < 8


def _resident() -> int:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc keeps some of what is freed, more of it in a process that has had much
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS"))


def test_silent_connections_do_not_block_transfers(monkeypatch):
    """64 of them once took all places for a minute."""
    monkeypatch.setattr(transports, "_KEY_SECONDS", 0.5)
    sender, receiver = TcpTransport(), TcpTransport()
    host, _, port = sender.address.rpartition(":")
    with contextlib.ExitStack() as stack:
        for each in (sender, receiver):
            stack.callback(each.close)
        for _ in range(200):
            silent = stack.enter_context(socket.create_connection((host, int(port)), timeout=30))
        sender.offer(5, ARRAYS)
        assert len(receiver.fetch(sender.address, 5, SPECS, 20.0)) == len(ARRAYS)
        # A connection that has sent no key is closed in time.
        assert silent.recv(1) == b""
