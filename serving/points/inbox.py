"""What other threads tell the engine's thread: arrived states, computed masks, written files."""

from __future__ import annotations

import queue
from collections.abc import Callable

PATIENCE = 0.002
"""Seconds that an idle engine waits for an awaited call before it looks for new requests."""


class Inbox:
    """Calls that other threads post, and that the engine's thread makes between steps."""

    def __init__(self) -> None:
        self.awaited = 0
        """Calls for which an idle engine waits briefly. Only the engine's thread changes it."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        """Makes the engine's thread call this. May be called from any thread."""
        self._calls.put(call)

    def take(self, patience: float = 0.0) -> bool:
        """Makes the oldest posted call, for which it waits up to `patience` seconds. Returns whether there was one."""
        try:
            call = self._calls.get(block=patience > 0, timeout=patience or None)
        except queue.Empty:
            return False
        call()
        return True

    def take_all(self, *, idle: bool = False) -> None:
        """Makes all posted calls. An idle engine waits for the first one, if one is awaited."""
        patience = PATIENCE if idle and self.awaited else 0.0
        while self.take(patience):
            patience = 0.0
