"""The routing events of a server: the states that it can continue from, and their recent changes; the other end of
them is a router's `Directory`.

A state is `stored` in a tier (`device`, `host`, `disk`) when requests can continue from it there, with all keys and
values, and `evicted` when they no longer can. The engine's thread writes; other threads read a snapshot first, then all
events after its number. The log is short: a reader that is too slow starts again with a snapshot.
"""

import threading
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from serving.core.cache.content import Chain, Name, NamedStates, State
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
    states: list[Event]
    """The states, each as if it was stored by this event."""


class Journal(IndexObserver):
    """The journal of one server. `most`: number of events that are kept."""

    def __init__(self, block: int, most: int = 1 << 14) -> None:
        self.block = block
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
            pairs = ((tier, state) for tier, held in self._held.items() for state in held.values())
            states = [Event(self._number, tier, state, True) for tier, state in pairs]
            return Snapshot(self._number, self._weights, states)

    def since(self, number: int, most: int = 512) -> list[Event] | None:
        """Returns up to a maximum number of events after a number; None: older events are lost, and the reader must
        start again."""
        with self._lock:
            first = self._log[0].number if self._log else self._number + 1
            if number < max(self._began, first - 1) or number > self._number:
                return None
            at = number - first + 1
            return list(islice(self._log, at, at + most))

    def _tell(self, tier: str, state: State, stored: bool) -> None:
        self._number += 1
        self._log.append(Event(self._number, tier, state, stored))

    def _begin_anew(self) -> None:
        self._number += 1
        self._began = self._number
        self._log.clear()


class Resumable(NamedTuple):
    """A state from which a prompt can continue, and its replica."""

    replica: Any
    position: int
    tiers: frozenset[str]


class Directory:
    """The states that each replica can continue from, as a router learns from the replicas' events.

    A replica reports a state once it can resume from it, with all pages, so the deepest state that a router finds for a
    prompt is work already done. Replicas may repeat events, withdraw unknown states, or contradict each other: the
    first description of a state counts, and others are refused. No event makes a method raise.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._told: dict[Hashable, dict[Name, set[str]]] = {}
        """The tiers of each state, by replica."""
        self._states: dict[Name, State] = {}
        self._replicas: dict[Name, set[Hashable]] = {}
        """Replicas with a state, by its name."""
        self._names = NamedStates()

    def __len__(self) -> int:
        return len(self._replicas)

    def states_of(self, replica: Hashable) -> int:
        """Number of states by replica."""
        return len(self._told.get(replica, ()))

    def stored(self, replica: Hashable, tier: str, state: State) -> bool:
        """Records that a replica can continue from a state. Returns False if this contradicts an earlier record of the
        state."""
        known = self._states.setdefault(state.name, state)
        if known != state:
            return False
        replicas = self._replicas.setdefault(state.name, set())
        if not replicas:
            self._names.add(state)
        replicas.add(replica)
        self._told.setdefault(replica, {}).setdefault(state.name, set()).add(tier)
        return True

    def evicted(self, replica: Hashable, tier: str, name: Name) -> None:
        """Records that a replica can no longer continue from a state."""
        tiers = self._told.get(replica, {}).get(name)
        if tiers is None:
            return
        tiers.discard(tier)
        if not tiers:
            del self._told[replica][name]
            self._gone(replica, name)

    def forget(self, replica: Hashable) -> None:
        """Forgets everything about a replica that has ended or restarted."""
        for name in self._told.pop(replica, {}):
            self._gone(replica, name)

    def find(self, chain: Chain, tokens: Sequence[int]) -> Iterator[Resumable]:
        """Returns the replicas that can continue from a prefix of these tokens: the deepest first, each replica
        once."""
        seen: set[Hashable] = set()
        for state in self._names.candidates(chain, tokens):
            for replica in self._replicas.get(state.name, ()):
                if replica not in seen:
                    seen.add(replica)
                    yield Resumable(replica, state.position, frozenset(self._told[replica][state.name]))

    def _gone(self, replica: Hashable, name: Name) -> None:
        replicas = self._replicas[name]
        replicas.discard(replica)
        if replicas:
            return
        del self._replicas[name]
        self._names.remove(self._states.pop(name))
