"""Arrays go from one server to another, or it is said in time that they do not."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from serving.split.transport import DirectTransport, JaxTransport, TcpTransport, TransportError, open_transports

ARRAYS = [jnp.arange(60.0).reshape(3, 20), jnp.ones((2, 3), jnp.bfloat16) * 3, jnp.zeros((0, 4))]
SPECS = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ARRAYS]


@pytest.fixture(scope="module", params=["direct", "tcp", "jax"])
def pair(request):
    kind = {"direct": DirectTransport, "tcp": TcpTransport, "jax": JaxTransport}[request.param]
    try:
        made = (kind("here"), kind("there")) if request.param == "direct" else (kind(), kind())
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


def test_nothing_offered_is_an_error_in_time(pair):
    sender, receiver = pair
    begin = time.monotonic()
    with pytest.raises(TransportError):
        receiver.fetch(sender.address, 77, SPECS, 0.3)
    assert time.monotonic() - begin < 5
    # And the connection still serves.
    sender.offer(78, ARRAYS)
    assert len(receiver.fetch(sender.address, 78, SPECS, 20.0)) == len(ARRAYS)


def test_what_was_drained_is_gone(pair):
    sender, receiver = pair
    sender.offer(5, ARRAYS)
    sender.drain(5)
    sender.drain(5)
    time.sleep(0.5)
    with pytest.raises(TransportError):
        receiver.fetch(sender.address, 5, SPECS, 0.3)


def test_unknown_transports_are_one_line():
    with pytest.raises(TransportError, match="must be one of jax, tcp"):
        open_transports(["pigeon"], "127.0.0.1")


def test_nobody_there(pair):
    _, receiver = pair
    with pytest.raises(TransportError):
        receiver.fetch("127.0.0.1:9", 1, SPECS, 0.5)
