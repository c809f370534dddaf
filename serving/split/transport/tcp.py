"""Transfers over TCP through host memory: works on every network, and costs two copies."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import threading
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serving.split.transport import TransportError

_KEY = struct.Struct("!Q")
_LENGTH = struct.Struct("!I")
_CHECKSUM = struct.Struct("!I")
_PIECE = 1 << 20
_MOST_READERS = 64  # maximum number of connections that receive arrays at a time
_MOST_SILENT = 128
"""Maximum number of connections that have not sent a key. A further one makes the server close the oldest of them."""
_KEY_SECONDS = 5.0  # maximum seconds until a connection sends its key, which receivers do immediately
_SERVING = 60.0  # maximum seconds to send all arrays to a reader


class TcpTransport:
    """The receiver sends a key; the sender answers with a header (shapes and dtypes), then each array and its CRC-32.

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
                (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, until))
                if not length:
                    raise TransportError(f"{address} does not have the requested state")
                # The expected sizes are known, so the other side cannot make this one allocate memory.
                if length != len(header) or _exactly(connection, length, until) != header:
                    raise TransportError(f"{address} sent unexpected shapes or dtypes")
                arrays = []
                for spec in specs:
                    size = int(np.prod(spec.shape)) * spec.dtype.itemsize
                    content = _exactly(connection, size, until)
                    (checksum,) = _CHECKSUM.unpack(_exactly(connection, _CHECKSUM.size, until))
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
                _send(connection, _LENGTH.pack(0), until)
            # Only workers with a ticket know a key, so other connections cannot occupy this semaphore.
            elif self._readers.acquire(timeout=_SERVING):
                try:
                    header = _header(arrays)
                    _send(connection, _LENGTH.pack(len(header)) + header, until)
                    for array in arrays:
                        content = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data
                        _send(connection, content, until)
                        _send(connection, _CHECKSUM.pack(zlib.crc32(content)), until)
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
