"""Which of many replicas could go on from which state: what a router learns from what they store and evict.

Replicas report states by content, apart from pages: a state is reported when it can be resumed from, pages and all, and
taken back when it cannot. So the deepest name that a router finds for a prompt is work that somebody need not do.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from serving.core.tiers.content import Chain, Name, state_name
from serving.core.tiers.tier import Unit


class Event(NamedTuple):
    """One replica has stored a unit in one of its tiers, or has it no more."""

    replica: int
    tier: str
    """`device`, `host` or `disk`."""
    unit: Unit
    stored: bool


class Resumable(NamedTuple):
    """Where a prompt could be gone on from."""

    replica: int
    position: int
    tiers: frozenset[str]


class Directory:
    """What all replicas have told. Events may come twice, or for what is not known: the last one counts."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._places: dict[Name, dict[int, set[str]]] = {}
        self._tails: dict[Name, dict[int, int]] = {}
        """By a unit's last link: how many known units have a tail of each length."""

    def __len__(self) -> int:
        return len(self._places)

    def hear(self, event: Event) -> None:
        """Take in one event."""
        unit = event.unit
        if event.stored:
            if unit.name not in self._places:
                tails = self._tails.setdefault(unit.links[-1], {})
                tails[unit.tail] = tails.get(unit.tail, 0) + 1
            self._places.setdefault(unit.name, {}).setdefault(event.replica, set()).add(event.tier)
            return
        places = self._places.get(unit.name, {})
        tiers = places.get(event.replica, set())
        tiers.discard(event.tier)
        if not tiers:
            places.pop(event.replica, None)
            if not places and self._places.pop(unit.name, None) is not None:
                self._forget_tail(unit)

    def forget(self, replica: int) -> None:
        """A replica has gone, or has begun anew: nothing that it told counts."""
        for name in [name for name, places in self._places.items() if replica in places]:
            # Names without places are found by nobody; their tails are looked up in vain until they are told again.
            del self._places[name][replica]

    def find(self, chain: Chain, tokens: Sequence[int]) -> Iterator[Resumable]:
        """All that could go on from somewhere in these tokens: the deepest first, each replica once."""
        links = chain.reach(tokens)
        seen: set[int] = set()
        for at in range(len(tokens) // chain.block, -1, -1):
            begin = at * chain.block
            for tail in sorted(self._tails.get(links[at], ()), reverse=True):
                position = begin + tail
                if not 0 < position <= len(tokens):
                    continue
                places = self._places.get(state_name(links[at], tokens[begin:position]), {})
                for replica, tiers in places.items():
                    if replica not in seen:
                        seen.add(replica)
                        yield Resumable(replica, position, frozenset(tiers))

    def _forget_tail(self, unit: Unit) -> None:
        tails = self._tails[unit.links[-1]]
        tails[unit.tail] -= 1
        if not tails[unit.tail]:
            del tails[unit.tail]
            if not tails:
                del self._tails[unit.links[-1]]
