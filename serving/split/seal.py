"""Authentication of messages between workers with the fleet's secret: HMAC-SHA256 (RFC 2104).

Messages decide which states are fetched from where, and for which prompt they are published. Every message has the
time, a random number, the receiver's name, and a code over these, the endpoint and the body. A receiver accepts each
message once, and only messages addressed to it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

HEADER = "x-mamba-jax-seal"
RECEIVER = "x-mamba-jax-receiver"  # header of a refusal, with the receiver's name, to which messages must be addressed
SECRET_VARIABLE = "MAMBA_JAX_SPLIT_SECRET"
_FRESH = 60.0  # maximum age of a message in seconds, including the difference between the clocks
_MOST_SEEN = 1 << 20  # maximum number of messages that a receiver remembers


@dataclass(frozen=True)
class Seal:
    """Signs messages. Without a secret, messages are not signed and receivers accept all."""

    secret: str = field(default="", repr=False)
    clock: Callable[[], float] = time.time

    def headers(self, path: str, body: bytes, receiver: str) -> dict[str, str]:
        """Returns the headers of a message to the endpoint at the end of `path`, on the server named `receiver`."""
        if not self.secret:
            return {}
        content = f"{self.clock():.3f}:{secrets.token_hex(8)}:{receiver}"
        return {HEADER: f"{content}:{self.code(content, path, body)}"}

    def code(self, content: str, path: str, body: bytes) -> str:
        """Returns the code of a message. It covers only the last two parts of the path, because a proxy may add a
        prefix."""
        endpoint = "/".join(path.split("/")[-2:])
        return hmac.new(self.secret.encode(), f"{content}\n{endpoint}\n".encode() + body, hashlib.sha256).hexdigest()


class SealChecker:
    """A receiver of sealed messages. Used by one thread."""

    def __init__(self, seal: Seal) -> None:
        self.name = secrets.token_hex(8)  # the name by which senders address this receiver; different after each start
        self._seal = seal
        self._seen: dict[str, float] = {}  # when each message was accepted, the oldest first

    def holds(self, header: str, path: str, body: bytes) -> bool:
        """Returns whether a message's header was created recently with the secret for this receiver, and is not a
        replay."""
        seal = self._seal
        if not seal.secret:
            return True
        content, _, code = header.rpartition(":")
        try:
            at, nonce, receiver = content.split(":")
            fresh = abs(seal.clock() - float(at)) <= _FRESH  # always False for NaN
        except ValueError:
            return False
        if not (fresh and hmac.compare_digest(code.encode(), seal.code(content, path, body).encode())):
            return False
        return receiver == self.name and self._is_new(nonce)

    def _is_new(self, nonce: str) -> bool:
        now = self._seal.clock()
        # A message may be dated _FRESH seconds in the future, and stays valid for _FRESH seconds after that.
        while self._seen and (len(self._seen) >= _MOST_SEEN or next(iter(self._seen.values())) < now - 2 * _FRESH):
            del self._seen[next(iter(self._seen))]
        if nonce in self._seen:
            return False
        self._seen[nonce] = now
        return True
