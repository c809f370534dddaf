"""Transports of arrays between workers: their interface, and two implementations."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import socket
import socketserver
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.errors import one_line

log = logging.getLogger(__name__)

_DISCARDING = 10.0  # maximum seconds to wait while draining an offer
_CLOSING = 1.0  # the same for all offers together after `close`: the process ends only when they are drained
_POLL = 0.0005, 0.01  # minimum and maximum seconds between checks whether arrays have arrived
_KEY = struct.Struct("!Q")
_NUMBER = struct.Struct("!I")  # the header's length, or a checksum
_PIECE = 1 << 20
_MOST_READERS = 64  # maximum number of connections that receive arrays at a time
_MOST_SILENT = 128
"""Maximum number of connections that have not sent a key. A further one makes the server close the oldest of them."""
_KEY_SECONDS = 5.0  # maximum seconds until a connection sends its key, which receivers do immediately
_SERVING = 60.0  # maximum seconds to send all arrays to a reader


class TransportError(RuntimeError):
    """Arrays could not be transferred in time. The message is one line."""


class Transport(Protocol):
    """Transfers lists of arrays, each list once, under a key that the sender chooses.

    The sender calls `offer` and `drain`, the receiver `fetch`. Any thread may call them.
    """

    @property
    def address(self) -> str:
        """Address from which other workers can fetch."""

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Keeps arrays until they are fetched or drained. Their computation may not have finished."""

    def drain(self, key: int, *, taken: bool = False) -> None:
        """Releases the memory soon: the arrays were fetched (`taken`: the receiver confirmed it) or will never be.

        Ignores unknown keys.
        """

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        """Fetches arrays with exactly these shapes and dtypes.

        Raises:
            TransportError: the arrays did not arrive within `timeout` seconds, or differ from `specs`.
        """

    def close(self) -> None:
        """Stops listening."""


class JaxTransport:
    """From device to device, with JAX's transfer engine `jax.experimental.transfer`: one server, and one connection to
    each peer.

    The engine has a table of offered arrays, from which a peer pulls by key, and no time limits. So the receiver sets a
    deadline, and the sender itself pulls an offer that no peer pulled.

    Raises:
        TransportError: this version of JAX has no transfer engine, or it does not start.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            from jax.experimental import transfer
        except ImportError:
            raise TransportError(
                f"jax {jax.__version__} has no jax.experimental.transfer on this platform; use --transport tcp"
            ) from None
        self._device = jax.local_devices()[0]
        try:
            self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransportError(f"could not start the transfer engine: {error}; use --transport tcp") from None
        self.address = self._server.address()
        self._sharding = jax.sharding.SingleDeviceSharding(self._device)
        self._connections: dict[str, Any] = {}
        self._offered: dict[int, list[jax.ShapeDtypeStruct]] = {}
        self._lock = threading.Lock()
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="drain")
        self._ends = math.inf

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        with self._lock:
            self._offered[key] = self._some(arrays)
        self._server.await_pull(key, [jax.device_put(x, self._device) for x in arrays if x.size])

    def drain(self, key: int, *, taken: bool = False) -> None:
        with self._lock:
            specs = self._offered.pop(key, None)
        if specs is not None and not taken:
            self._drains.submit(self._discard, key, specs)

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        begin, placed = time.monotonic(), self._some(specs)
        try:
            arrays: list[Any] = self._pull(address, key, placed)
            for array in arrays:
                while not array.is_ready():
                    waited = time.monotonic() - begin
                    if waited > timeout:
                        # Keep the connection: a new one needs four file descriptors, and this one keeps its own while
                        # arrays may still arrive.
                        raise TransportError(f"no arrays from {address} within {timeout:g} s")
                    # The interval grows with the wait, so arrivals are noticed soon and long waits need few checks.
                    time.sleep(min(max(waited / 8, _POLL[0]), _POLL[1]))
            # Failed arrays also count as ready; this raises their error.
            jax.block_until_ready(arrays)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            with self._lock:
                self._connections.pop(address, None)  # the next fetch connects again
            raise TransportError(f"fetching from {address} failed: {one_line(error, 200)}") from None
        arrived = iter(arrays)
        return [next(arrived) if spec.size else jnp.zeros(spec.shape, spec.dtype) for spec in specs]

    def close(self) -> None:
        with self._lock:
            keys = list(self._offered)
            self._connections.clear()
        self._ends = time.monotonic() + _CLOSING
        for key in keys:
            self.drain(key)
        self._drains.shutdown(wait=False)

    def _some(self, arrays: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.ShapeDtypeStruct]:
        """Describes the arrays that have elements, because the engine never delivers others."""
        return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding) for x in arrays if x.size]

    def _discard(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Pulls an offer to discard it. Offers are discarded one at a time, because a pull allocates as much memory as
        the offer."""
        until = time.monotonic() + _DISCARDING
        try:
            arrays: list[Any] = self._pull(self.address, key, specs)
            while not all(array.is_ready() for array in arrays) and time.monotonic() < min(until, self._ends):
                time.sleep(_POLL[0])
        except RuntimeError as error:
            log.warning("could not discard an offer: %s", one_line(error))

    def _pull(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        with self._lock:
            connection = self._connections.get(address)
            if connection is None:
                connection = self._connections[address] = self._server.connect(address)
        return connection.pull(key, list(specs))


class TcpTransport:
    """Through host memory: works on every network, and costs two copies.

    The receiver sends a key; the sender answers with a header (shapes and dtypes), then each array and its CRC-32.

    The sender keeps a copy until it has sent all of it, so that a receiver can fetch again after a broken connection.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._offered: dict[int, list[jax.Array]] = {}
        self._lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(_MOST_READERS)
        self._silent: dict[socket.socket, None] = {}
        self._server = _Server((host, 0), lambda connection, *_: self._serve(connection))  # type: ignore[arg-type]
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, name="tcp-transport", daemon=True).start()

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        with self._lock:
            self._offered[key] = list(arrays)

    def drain(self, key: int, *, taken: bool = False) -> None:
        with self._lock:
            self._offered.pop(key, None)

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        until = time.monotonic() + timeout
        host, _, port = address.rpartition(":")
        header = _header(specs)
        try:
            with socket.create_connection((host, int(port)), timeout=timeout) as connection:
                connection.sendall(_KEY.pack(key))
                (length,) = _NUMBER.unpack(_exactly(connection, _NUMBER.size, until))
                if not length:
                    raise TransportError(f"{address} does not have the requested state")
                # The expected sizes are known, so the other side cannot make this one allocate memory.
                if length != len(header) or _exactly(connection, length, until) != header:
                    raise TransportError(f"{address} sent unexpected shapes or dtypes")
                arrays = []
                for spec in specs:
                    content = _exactly(connection, spec.size * spec.dtype.itemsize, until)
                    (checksum,) = _NUMBER.unpack(_exactly(connection, _NUMBER.size, until))
                    if zlib.crc32(content) != checksum:
                        raise TransportError(f"an array from {address} is damaged: its checksum differs")
                    arrays.append(np.frombuffer(content, jnp.dtype(spec.dtype)).reshape(spec.shape))
                return arrays
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"fetching from {address} failed: {error}") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            key = self._requested_key(connection)
            until = time.monotonic() + _SERVING
            with self._lock:
                arrays = self._offered.get(key)
            if arrays is None:
                _send(connection, _NUMBER.pack(0), until)
            # Only workers with a ticket know a key, so other connections cannot occupy this semaphore.
            elif self._readers.acquire(timeout=_SERVING):
                try:
                    header = _header(arrays)
                    _send(connection, _NUMBER.pack(len(header)) + header, until)
                    for array in arrays:
                        content = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data
                        _send(connection, content, until)
                        _send(connection, _NUMBER.pack(zlib.crc32(content)), until)
                finally:
                    self._readers.release()
                self.drain(key)

    def _requested_key(self, connection: socket.socket) -> int:
        with self._lock:
            self._silent[connection] = None
            oldest = next(iter(self._silent)) if len(self._silent) > _MOST_SILENT else None
            if oldest is not None:
                del self._silent[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            return int(_KEY.unpack(_exactly(connection, _KEY.size, time.monotonic() + _KEY_SECONDS))[0])
        finally:
            with self._lock:
                self._silent.pop(connection, None)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


def _header(arrays: Sequence[Any]) -> bytes:
    return json.dumps([[list(x.shape), str(x.dtype)] for x in arrays]).encode()


def _exactly(connection: socket.socket, size: int, until: float) -> bytearray:
    """Reads `size` bytes. Raises `OSError` if the other side stops before, or takes longer than `until`."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        _wait_until(connection, until, at, size)
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError(f"the connection ended after {at} of {size} bytes")
        at += count
    return buffer


def _send(connection: socket.socket, content: Any, until: float) -> None:
    view = memoryview(content)
    for at in range(0, len(view), _PIECE):
        _wait_until(connection, until, at, len(view))
        connection.sendall(view[at : at + _PIECE])


def _wait_until(connection: socket.socket, until: float, at: int, size: int) -> None:
    """Sets the timeout to the time left: a constant timeout per wait would let a slow peer continue forever."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"timed out after {at} of {size} bytes")
    connection.settimeout(left)
