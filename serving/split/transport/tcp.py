"""Bytes over TCP, by way of the host: works wherever workers reach each other, and costs two copies."""

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

from serving.split.transport.base import TransportError

_KEY = struct.Struct("!Q")
_LENGTH = struct.Struct("!I")
_CHECKSUM = struct.Struct("!I")
_PIECE = 1 << 20
_MOST_READERS = 64
"""Connections to which arrays are sent at once."""
_MOST_SILENT = 128
"""Connections that have not sent a key. One more closes the one that has been silent for longest."""
_KEY_SECONDS = 5.0
"""Time for a connection to send its key, which a receiver does at once."""
_SERVING = 60.0
"""Seconds in which a reader must have taken everything."""


class TcpTransport:
    """A key goes one way; a header with shapes and dtypes, then each array's bytes and their CRC-32, go the other.

    A copy stays until all of it has been sent, so a receiver that dies half way loses nothing but time.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._offered: dict[int, list[jax.Array]] = {}
        self._lock = threading.Lock()
        self._readers = threading.BoundedSemaphore(_MOST_READERS)
        self._silent: dict[socket.socket, None] = {}
        transport = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    transport._serve(self.request)

        self._server = _Server((host, 0), Handler)
        self.address = f"{host}:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="tcp-transport", daemon=True)
        self._thread.start()

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
                    raise TransportError(f"{address} has none of it")
                # What is expected is known to the byte: nothing is allocated on the other side's word.
                if length != len(header) or _exactly(connection, length, until) != header:
                    raise TransportError(f"{address} offers other arrays than were expected")
                arrays = []
                for spec in specs:
                    size = int(np.prod(spec.shape)) * spec.dtype.itemsize
                    content = _exactly(connection, size, until)
                    (checksum,) = _CHECKSUM.unpack(_exactly(connection, _CHECKSUM.size, until))
                    if zlib.crc32(content) != checksum:
                        raise TransportError(f"what came from {address} is damaged: its checksum differs")
                    arrays.append(np.frombuffer(content, jnp.dtype(spec.dtype)).reshape(spec.shape))
                return arrays
        except (OSError, ValueError, OverflowError) as error:
            raise TransportError(f"fetching from {address} failed: {error}") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        arrays = self._asked_for(connection)
        until = time.monotonic() + _SERVING
        if arrays is None:
            _send(connection, _LENGTH.pack(0), until)
            return
        # A key is known only to those who were told it, so other connections take none of these places.
        if not self._readers.acquire(timeout=_SERVING):
            return
        try:
            header = _header(arrays[1])
            _send(connection, _LENGTH.pack(len(header)) + header, until)
            for array in arrays[1]:
                content = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data
                _send(connection, content, until)
                _send(connection, _CHECKSUM.pack(zlib.crc32(content)), until)
        finally:
            self._readers.release()
        self.drain(arrays[0])

    def _asked_for(self, connection: socket.socket) -> tuple[int, list[jax.Array]] | None:
        """The key that a connection sends, and the arrays behind it."""
        with self._lock:
            self._silent[connection] = None
            oldest = next(iter(self._silent)) if len(self._silent) > _MOST_SILENT else None
            if oldest is not None:
                del self._silent[oldest]
        if oldest is not None:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        try:
            (key,) = _KEY.unpack(_exactly(connection, _KEY.size, time.monotonic() + _KEY_SECONDS))
        finally:
            with self._lock:
                self._silent.pop(connection, None)
        with self._lock:
            arrays = self._offered.get(key)
        return None if arrays is None else (key, arrays)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128


def _header(arrays: Sequence[Any]) -> bytes:
    return json.dumps([[list(x.shape), str(x.dtype)] for x in arrays]).encode()


def _exactly(connection: socket.socket, size: int, until: float) -> bytearray:
    """That many bytes. Raises `OSError` where the other side stops before, or takes longer than `until`."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        _wait_until(connection, until, at, size)
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError(f"the other side stopped after {at} of {size} bytes")
        at += count
    return buffer


def _send(connection: socket.socket, content: Any, until: float) -> None:
    view = memoryview(content)
    for at in range(0, len(view), _PIECE):
        _wait_until(connection, until, at, len(view))
        connection.sendall(view[at : at + _PIECE])


def _wait_until(connection: socket.socket, until: float, at: int, size: int) -> None:
    """Each wait ends at the end of all: a timeout of every single wait would let a slow peer go on for ever."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"{at} of {size} bytes in time")
    connection.settimeout(left)
