"""Marks: positions of a prompt from which its client will continue again, and the states that are kept there.

A recurrent state cannot be cut back, so a prefix is reused only where a state was stored. Prefill ends a tile at each
mark and publishes the state there. A mark with a time keeps its state while others are evicted: of a bounded number of
such states, no client takes the share of another.
"""

import math
import reprlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from serving.core.cache.prefix_tree import Checkpoint
from serving.core.reasons import RequestError

LONGEST_TTL = 86_400.0
"""Maximum time of a mark in seconds."""
MAX_MARKS = 8
"""Maximum number of marks of a request; the deepest ones are kept."""

_WHOLE = 1 << 40
"""The share that all kept states have together, at most."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Mark:
    """A position of a prompt at which a state is worth keeping."""

    position: int = 0
    """Number of prompt tokens before it; required, at least 1."""
    ttl: float | None = None
    """Seconds for which the state is evicted after all others, from its last use by a request with this mark. None:
    like the end of a prompt."""

    def __post_init__(self) -> None:
        ttl = self.ttl
        timed = isinstance(ttl, (int, float)) and not isinstance(ttl, bool) and 0 < ttl <= LONGEST_TTL
        if type(self.position) is not int or self.position < 1 or not (timed or ttl is None):
            raise RequestError(
                "a mark has a position (tokens, at least 1), and None or a ttl (seconds above 0 and up to "
                f"{LONGEST_TTL:g}), got {reprlib.repr(self.position)} and {reprlib.repr(ttl)}"
            )


def merged(marks: Iterable[Mark]) -> dict[int, Mark]:
    """Returns the deepest marks by position, at most `MAX_MARKS`; of several at one position that with the longest
    time."""
    found = {mark.position: mark for mark in sorted(marks, key=lambda mark: (mark.position, mark.ttl or 0.0))}
    return dict(list(found.items())[-MAX_MARKS:])


def written_tokens(marks: Mapping[int, Mark], num_cached_tokens: int) -> dict[float | None, int]:
    """Returns the numbers of prompt tokens that a request has added to those that were cached, by the `ttl` of the
    marks whose states it has published."""
    found: dict[float | None, int] = {}
    before = num_cached_tokens
    for position in sorted(marks):
        if position > before:
            ttl = marks[position].ttl
            found[ttl] = found.get(ttl, 0) + position - before
            before = position
    return found


class KeptStates:
    """The states that marks keep, each until its time has passed.

    Args:
        most: maximum number of states.
        most_tokens: maximum number of tokens before all of them, whose pages they need. At the limit, the client that
            keeps most loses the state marked longest ago.
        clock: returns seconds.
    """

    def __init__(self, most: int, most_tokens: float, clock: Clock = time.monotonic) -> None:
        self._most, self._most_tokens, self._clock = most, most_tokens, clock
        self._clients: dict[Checkpoint, str | None] = {}
        self._states: dict[str | None, dict[Checkpoint, int]] = {}
        """The states of each client and their numbers, the one marked longest ago first."""
        self._shares: Counter[str | None] = Counter()
        """Of each client, as integers: their sums are exact."""
        self._total = self._marked = 0
        self._first_end = math.inf

    def keep(self, entry: Checkpoint, seconds: float, client: str | None) -> list[Checkpoint]:
        """Keeps a state for a time. Returns the states that are not kept any more."""
        until = max(self._clock() + seconds, entry.kept_until)
        self.forget(entry)
        share = self._share(entry)
        if share > _WHOLE:
            return [entry]
        entry.kept_until = until
        self._first_end = min(self._first_end, until)
        self._marked += 1
        self._clients[entry] = client
        self._states.setdefault(client, {})[entry] = self._marked
        self._shares[client] += share
        self._total += share
        over = []
        while self._total > _WHOLE:
            largest = max(self._states, key=lambda each: (self._shares[each], -next(iter(self._states[each].values()))))
            over.append(next(iter(self._states[largest])))
            self.forget(over[-1])
        return over

    def _share(self, entry: Checkpoint) -> int:
        if not self._most or entry.position > self._most_tokens:
            return _WHOLE + 1
        return int(max(1 / self._most, entry.position / self._most_tokens) * _WHOLE)

    def ended(self) -> list[Checkpoint]:
        """Returns the states whose time has passed since the last call. They are not kept any more."""
        if not self._clients or (now := self._clock()) < self._first_end:
            return []
        found = [entry for entry in self._clients if entry.kept_until <= now]
        for entry in found:
            self.forget(entry)
        self._first_end = min((entry.kept_until for entry in self._clients), default=math.inf)
        return found

    def forget(self, entry: Checkpoint) -> bool:
        """Ends the time of a state, if it is kept. Returns whether it was."""
        entry.kept_until = 0.0
        if entry not in self._clients:
            return False
        client, share = self._clients.pop(entry), self._share(entry)
        del self._states[client][entry]
        self._shares[client] -= share
        self._total -= share
        if not self._states[client]:
            del self._states[client], self._shares[client]
        return True
