"""The states that each replica can continue from, as a router learns from the replicas' events.

Replicas report states by content and do not report pages: a replica reports a state once it can resume from it, with
all pages, and withdraws it when it cannot. So the deepest state that a router finds for a prompt is work already done.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serving.core.cache.content import Chain, Name, NamedStates, State


class Resumable(NamedTuple):
    """A state from which a prompt can continue, and its replica."""

    replica: int
    position: int
    tiers: frozenset[str]


class Directory:
    """The events of all replicas. They may repeat events, withdraw unknown states, or contradict each
    other: the first description of a state counts, and others are refused. No event makes a method raise.
    """

    def __init__(self, block: int) -> None:
        self.block = block
        self._told: dict[int, dict[Name, set[str]]] = {}
        """The tiers of each state, by replica."""
        self._states: dict[Name, State] = {}
        self._replicas: dict[Name, set[int]] = {}
        """Replicas with a state, by its name."""
        self._names = NamedStates()

    def __len__(self) -> int:
        return len(self._replicas)

    def states_of(self, replica: int) -> int:
        """Number of states by replica."""
        return len(self._told.get(replica, ()))

    def stored(self, replica: int, tier: str, state: State) -> bool:
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

    def evicted(self, replica: int, tier: str, name: Name) -> None:
        """Records that a replica can no longer continue from a state."""
        tiers = self._told.get(replica, {}).get(name)
        if tiers is None:
            return
        tiers.discard(tier)
        if not tiers:
            del self._told[replica][name]
            self._gone(replica, name)

    def forget(self, replica: int) -> None:
        """Forgets everything about a replica that has ended or restarted."""
        for name in self._told.pop(replica, {}):
            self._gone(replica, name)

    def find(self, chain: Chain, tokens: Sequence[int]) -> Iterator[Resumable]:
        """Returns the replicas that can continue from a prefix of these tokens: the deepest first, each replica
        once."""
        seen: set[int] = set()
        for state in self._names.candidates(chain, tokens):
            for replica in self._replicas.get(state.name, ()):
                if replica not in seen:
                    seen.add(replica)
                    yield Resumable(replica, state.position, frozenset(self._told[replica][state.name]))

    def _gone(self, replica: int, name: Name) -> None:
        replicas = self._replicas[name]
        replicas.discard(replica)
        if replicas:
            return
        del self._replicas[name]
        self._names.remove(self._states.pop(name))
