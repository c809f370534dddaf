"""Proof that a message between workers comes from one who knows the fleet's secret: HMAC-SHA256 (RFC 2104).

Messages between workers decide which states are fetched from where and published for which prompt, so only the fleet's
own count. The secret itself never travels: every message carries the time, a random number, the receiver's name, and a
code over these, the endpoint and the body. A receiver takes each message once, and none that was made for another one.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

HEADER = "x-mamba-jax-seal"
RECEIVER = "x-mamba-jax-receiver"
"""Of a refusal: the name by which the receiver wants to be addressed."""
SECRET_VARIABLE = "MAMBA_JAX_SPLIT_SECRET"
_FRESH = 60.0
"""Seconds by which the clocks of two machines, and the ends of one message's way, may differ."""
_MOST_SEEN = 1 << 20
"""Messages of the fleet that a receiver remembers."""


@dataclass(frozen=True)
class Seal:
    """Signs messages. Without a secret nothing is signed, and everything counts."""

    secret: str = field(default="", repr=False)
    clock: Callable[[], float] = time.time

    def headers(self, path: str, body: bytes, receiver: str) -> dict[str, str]:
        """The headers of a message to the endpoint at the end of `path`, on the server named `receiver`."""
        if not self.secret:
            return {}
        made = f"{self.clock():.3f}:{secrets.token_hex(8)}:{receiver}"
        return {HEADER: f"{made}:{self.code(made, path, body)}"}

    def code(self, made: str, path: str, body: bytes) -> str:
        """The code of a message. A proxy may serve the endpoint below another path, so only its own name counts."""
        endpoint = "/".join(path.split("/")[-2:])
        return hmac.new(self.secret.encode(), f"{made}\n{endpoint}\n".encode() + body, hashlib.sha256).hexdigest()


class SealChecker:
    """A receiver of sealed messages. Used by one thread."""

    def __init__(self, seal: Seal) -> None:
        self.name = secrets.token_hex(8)
        """By which senders address it; another one after each start."""
        self._seal = seal
        self._seen: set[str] = set()
        self._order: deque[tuple[float, str]] = deque()

    def holds(self, given: str, path: str, body: bytes) -> bool:
        """Whether a message's header was made with the secret, lately, for this receiver, and has not come before."""
        seal = self._seal
        if not seal.secret:
            return True
        made, _, code = given.rpartition(":")
        try:
            at, nonce, receiver = made.split(":")
            fresh = abs(seal.clock() - float(at)) <= _FRESH  # (never for NaN)
        except ValueError:
            return False
        if not (fresh and hmac.compare_digest(code.encode(), seal.code(made, path, body).encode())):
            return False
        return receiver == self.name and self._is_new(nonce)

    def _is_new(self, nonce: str) -> bool:
        now = self._seal.clock()
        # A message may be dated _FRESH seconds ahead, and is fresh for as long after that.
        while self._order and (self._order[0][0] < now - 2 * _FRESH or len(self._order) >= _MOST_SEEN):
            self._seen.discard(self._order.popleft()[1])
        if nonce in self._seen:
            return False
        self._seen.add(nonce)
        self._order.append((now, nonce))
        return True
