"""The routing events of a server: the states that it can continue from, and their recent changes.

A state is `stored` in a tier (`device`, `host`, `disk`) when requests can continue from it there, with all keys and
values, and `evicted` when they no longer can. Pages alone are not reported, because no request can continue from them.

The engine's thread writes; other threads read. A reader reads a snapshot first, then all events after the snapshot's
number. The log is short. A reader that is too slow, or that read before a reset, gets an answer that says so and starts
again with a snapshot.
"""

import secrets
import threading
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from serving.core.cache.content import Name, State
from serving.core.cache.prefix_tree import Checkpoint, IndexObserver

DEVICE = "device"


class Event(NamedTuple):
    """A state was added to a tier, or removed from it."""

    number: int
    """The number of the previous event plus one."""
    tier: str
    state: State
    stored: bool


class Snapshot(NamedTuple):
    """All states after an event."""

    number: int
    weights: int
    """Number of weight updates so far, which is a part of every name."""
    states: list[tuple[str, State]]
    """The states, with their tiers."""


class Journal(IndexObserver):
    """The journal of one server. `most`: number of events that are kept."""

    def __init__(self, block: int, most: int = 1 << 14) -> None:
        self.block = block
        self.id = secrets.token_hex(8)
        """An id that differs after each start."""
        self._held: dict[str, dict[Name, State]] = {}
        self._log: deque[Event] = deque(maxlen=most)
        self._number = self._began = self._weights = 0
        self._lock = threading.Lock()

    # -- the engine's thread --

    def published(self, entry: Checkpoint) -> None:
        if not entry.stale:
            self.stored(DEVICE, entry.state)

    def dropping(self, entry: Checkpoint, *, trusted: bool, low_value: bool) -> None:
        if not entry.stale:  # these have not been published since the weights were replaced
            self.evicted(DEVICE, entry.state.name)

    def cleared(self) -> None:
        self.lost(DEVICE)

    def stored(self, tier: str, state: State) -> None:
        """Records a state from which a request can continue."""
        with self._lock:
            held = self._held.setdefault(tier, {})
            if state.name not in held:
                held[state.name] = state
                self._tell(tier, state, True)

    def evicted(self, tier: str, name: Name) -> None:
        """Records that requests can no longer continue from a state. Does nothing if none could before."""
        with self._lock:
            state = self._held.get(tier, {}).pop(name, None)
            if state is not None:
                self._tell(tier, state, False)

    def lost(self, tier: str) -> None:
        """Records that a tier has lost all states."""
        with self._lock:
            self._held.pop(tier, None)
            self._begin_anew()

    def outdate(self) -> None:
        with self._lock:
            self._held.clear()
            self._weights += 1
            self._begin_anew()

    # -- any thread --

    def snapshot(self) -> Snapshot:
        """The present states."""
        with self._lock:
            states = [(tier, state) for tier, held in self._held.items() for state in held.values()]
            return Snapshot(self._number, self._weights, states)

    def since(self, number: int, most: int = 512) -> list[Event] | None:
        """Returns up to a maximum number of events after a number; None: older events are lost, and the reader must
        start again."""
        with self._lock:
            first = self._log[0].number if self._log else self._number + 1
            if number < max(self._began, first - 1) or number > self._number:
                return None
            return list(self._after(number - first + 1, most))

    def _after(self, at: int, most: int) -> Iterator[Event]:
        return islice(self._log, at, at + most)

    def _tell(self, tier: str, state: State, stored: bool) -> None:
        self._number += 1
        self._log.append(Event(self._number, tier, state, stored))

    def _begin_anew(self) -> None:
        self._number += 1
        self._began = self._number
        self._log.clear()
