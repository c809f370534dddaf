"""Bytes over TCP, by way of the host: works wherever workers reach each other, and costs two copies."""

from __future__ import annotations

import contextlib
import json
import socket
import socketserver
import struct
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from serving.disagg.transport.base import TransportError

_KEY = struct.Struct("!Q")
_LENGTH = struct.Struct("!I")


class TcpTransport:
    """A key goes one way; a header with shapes and dtypes, then the arrays' bytes, go the other.

    A copy stays until all of it has been sent, so a receiver that dies half way loses nothing but time.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._offered: dict[int, list[jax.Array]] = {}
        self._lock = threading.Lock()
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
        host, _, port = address.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=timeout) as connection:
                connection.sendall(_KEY.pack(key))
                (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size))
                found = json.loads(_exactly(connection, length))
                expected = [[list(spec.shape), str(spec.dtype)] for spec in specs]
                if found != expected:
                    raise TransportError(
                        f"{address} offers other arrays than were expected" if found else f"{address} has none of it"
                    )
                arrays = []
                for spec in specs:
                    size = int(np.prod(spec.shape)) * spec.dtype.itemsize
                    arrays.append(np.frombuffer(_exactly(connection, size), jnp.dtype(spec.dtype)).reshape(spec.shape))
                return arrays
        except (OSError, ValueError) as error:
            raise TransportError(f"fetching from {address} failed: {error}") from None

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, connection: socket.socket) -> None:
        connection.settimeout(60.0)
        (key,) = _KEY.unpack(_exactly(connection, _KEY.size))
        with self._lock:
            arrays = list(self._offered.get(key, ()))
        header = json.dumps([[list(x.shape), str(x.dtype)] for x in arrays]).encode()
        connection.sendall(_LENGTH.pack(len(header)) + header)
        for array in arrays:
            connection.sendall(np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data)
        self.drain(key)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """That many bytes. Raises `OSError` where the other side stops before."""
    buffer = bytearray(size)
    view, at = memoryview(buffer), 0
    while at < size:
        count = connection.recv_into(view[at:])
        if not count:
            raise ConnectionError(f"the other side stopped after {at} of {size} bytes")
        at += count
    return buffer
