"""Proof that a message between workers comes from one who knows the fleet's secret: HMAC-SHA256 (RFC 2104).

What workers tell each other decides which states are fetched from where and published for which prompt, so a
stranger's word must not count. The secret itself never travels: every message carries the time, and a code over time,
path and body.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable
from dataclasses import dataclass, field

HEADER = "x-mamba-jax-seal"
SECRET_VARIABLE = "MAMBA_JAX_SPLIT_SECRET"
_FRESH = 60.0
"""Seconds by which the clocks of two machines, and the ends of one message's way, may differ."""


@dataclass(frozen=True)
class Seal:
    """Signs and checks messages. Without a secret nothing is signed, and everything counts."""

    secret: str = field(default="", repr=False)
    clock: Callable[[], float] = time.time

    def headers(self, path: str, body: bytes) -> dict[str, str]:
        """What a message to `path` is to be sent with."""
        if not self.secret:
            return {}
        now = f"{self.clock():.3f}"
        return {HEADER: f"{now}:{self._code(now, path, body)}"}

    def holds(self, given: str, path: str, body: bytes) -> bool:
        """Whether a message's header is that of somebody who knows the secret, and not an old one."""
        if not self.secret:
            return True
        at, _, code = given.partition(":")
        try:
            fresh = abs(self.clock() - float(at)) <= _FRESH  # (never for NaN)
        except ValueError:
            return False
        return fresh and hmac.compare_digest(code.encode(), self._code(at, path, body).encode())

    def _code(self, at: str, path: str, body: bytes) -> str:
        return hmac.new(self.secret.encode(), f"{at}\n{path}\n".encode() + body, hashlib.sha256).hexdigest()
