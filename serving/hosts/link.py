"""One connection between two hosts: a handshake with a shared key, then frames of bounded size."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from enum import IntEnum

MAX_FRAME = 64 << 20
"""Bytes of one frame; a step's arrays take some kilobytes, a seat with penalties five for each word."""
_HEADER = struct.Struct(">BI")
_HANDSHAKE = struct.Struct(">I32s32s")
_HANDSHAKE_TIMEOUT = 3.0  # seconds for the whole handshake


class Kind(IntEnum):
    """The content of a frame."""

    HEARTBEAT = 0  # no content; the sender is alive
    FACTS = 1  # how a host was started (JSON)
    READY = 2  # a host can run steps now
    CALL = 3  # the leader dispatches a batch (`wire`)
    DONE = 4  # no call will follow
    LEAVE = 5  # a follower requests shutdown
    FAILED = 6  # a host exits; the content is the reason in one line
    CLOSE = 7  # the leader shuts down all hosts in order


class LinkError(Exception):
    """The other host has failed, or is not the expected one. The message is a part of a sentence."""


class LinkClosed(LinkError):
    """The other host closed the connection."""


class Link:
    """Frames to and from one host. Any thread may send; one receives. `timeout`: seconds without received or accepted
    data after which the other counts as lost."""

    def __init__(self, connected: socket.socket, timeout: float) -> None:
        self._socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sending = threading.Lock()
        self.timeout = timeout

    @property
    def timeout(self) -> float:
        return self._timeout

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        self._timeout = seconds
        self._socket.settimeout(seconds)

    def send(self, kind: Kind, *pieces: bytes | memoryview) -> None:
        """Sends one frame. Raises LinkError if it cannot be sent."""
        size = sum(len(piece) for piece in pieces)
        if size > MAX_FRAME:
            raise LinkError(f"would get a message of {size:,} bytes, more than {MAX_FRAME:,}")
        with self._sending:
            self._send(b"".join((_HEADER.pack(kind, size), *pieces)))

    def receive(self) -> tuple[Kind, bytes]:
        """Receives the next frame. Raises LinkError if there is none, or its type is unknown."""
        kind, size = _HEADER.unpack(self._take(_HEADER.size))
        if size > MAX_FRAME:
            raise LinkError(f"sent a message of {size:,} bytes, more than {MAX_FRAME:,}")
        payload = self._take(size)
        try:
            return Kind(kind), payload
        except ValueError:
            raise LinkError(f"sent the unknown message type {kind}") from None

    def is_closed(self) -> bool:
        """Whether the other host has closed the connection, which must have nothing to receive."""
        with contextlib.suppress(TimeoutError, BlockingIOError):
            self._socket.settimeout(0.0)
            try:
                return not self._socket.recv(1, socket.MSG_PEEK)
            except ConnectionError:
                return True
            finally:
                self.timeout = self.timeout
        return False

    def greets_as_http2(self) -> bool:
        """Whether the other side begins as a server of HTTP/2 does, for example JAX's coordinator."""
        try:
            return self._socket.recv(9, socket.MSG_PEEK)[3:] == b"\x04" + bytes(5)  # SETTINGS of the whole connection
        except OSError:
            return False

    def close(self) -> None:
        """Closes the connection. The other side reads an end of file after what was sent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def authenticate_to_leader(self, key: bytes, host: int) -> None:
        """A follower's part of the handshake, in which both prove that they know the key. May raise LinkError."""
        until = time.monotonic() + _HANDSHAKE_TIMEOUT
        theirs, ours = self._take(32, until), secrets.token_bytes(32)
        self._send(_HANDSHAKE.pack(host, ours, _proof(key, b"follower", host, theirs, ours)))
        if not hmac.compare_digest(self._take(32, until), _proof(key, b"leader", host, theirs, ours)):
            raise LinkError("has a wrong key")
        self.timeout = self.timeout

    def authenticate_follower(self, key: bytes) -> int:
        """The leader's part of `authenticate_to_leader`. Returns the follower's number."""
        until = time.monotonic() + _HANDSHAKE_TIMEOUT
        self._socket.settimeout(_HANDSHAKE_TIMEOUT)
        ours = secrets.token_bytes(32)
        self._send(ours)
        host, theirs, proof = _HANDSHAKE.unpack(self._take(_HANDSHAKE.size, until))
        if not hmac.compare_digest(proof, _proof(key, b"follower", host, ours, theirs)):
            raise LinkError("has a wrong key")
        self._send(_proof(key, b"leader", host, ours, theirs))
        self.timeout = self.timeout
        return int(host)

    @contextlib.contextmanager
    def _as_link_error(self, verb: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise LinkError(f"{verb} nothing for {self._timeout:g} s") from None
        except ConnectionError:
            raise LinkClosed("closed the connection") from None
        except OSError as error:
            raise LinkError(f"is not reachable ({error.strerror or error})") from None

    def _send(self, data: bytes) -> None:
        with self._as_link_error("accepted"):
            self._socket.sendall(data)

    def _take(self, size: int, until: float | None = None) -> bytes:
        """Receives `size` bytes, by the time `until` if it is given."""
        found: bytearray | bytes = bytearray()
        while len(found) < size:
            with self._as_link_error("sent"):
                if until is not None:
                    left = until - time.monotonic()
                    if left <= 0:
                        raise LinkError(f"did not authenticate within {_HANDSHAKE_TIMEOUT:g} s")
                    self._socket.settimeout(left)
                piece = self._socket.recv(min(size - len(found), 1 << 20))
            if not piece:
                raise LinkClosed("closed the connection")
            found += piece
        return bytes(found)


def _proof(key: bytes, role: bytes, host: int, *nonces: bytes) -> bytes:
    return hmac.digest(key, b"".join((role, host.to_bytes(4, "big"), *nonces)), "sha256")
