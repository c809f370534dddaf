"""A bounded store whose owners do not lose their shares to each other."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class FairLru(Generic[V]):
    """Values by key, within limits. Not thread-safe.

    At a limit, it evicts the least recently used value of the owner that uses most of what is limited.

    Args:
        most: maximum number of values.
        most_bytes: maximum size of all values together; a larger value is not stored.
    """

    def __init__(self, most: int, most_bytes: int = 0) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._values: dict[str, tuple[V, Hashable, int]] = {}
        """Values, their owners and their sizes by key."""
        self._used: dict[Hashable, OrderedDict[str, None]] = {}
        """Keys of each owner, the least recently used first."""
        self._bytes = Counter[Hashable]()

    def __len__(self) -> int:
        return len(self._values)

    @property
    def num_bytes(self) -> int:
        """Size of all values."""
        return self._bytes.total()

    def put(self, key: str, value: V, owner: Hashable, num_bytes: int = 0) -> None:
        """Stores a value, which then counts for `owner`. A value that has the key is replaced."""
        self.pop(key)
        if num_bytes > self._most_bytes:
            return
        self._values[key] = value, owner, num_bytes
        self._used.setdefault(owner, OrderedDict())[key] = None
        self._bytes[owner] += num_bytes
        while len(self) > self._most:
            self._evict(max(self._used, key=lambda each: len(self._used[each])))
        while self.num_bytes > self._most_bytes:
            self._evict(max(self._used, key=self._bytes.__getitem__))

    def get(self, key: str) -> V | None:
        """Returns a value, which is then the most recently used of its owner; None if there is none."""
        if key not in self._values:
            return None
        value, owner, _ = self._values[key]
        self._used[owner].move_to_end(key)
        return value

    def pop(self, key: str) -> None:
        """Removes a value, if it is there."""
        if key in self._values:
            _, owner, num_bytes = self._values.pop(key)
            self._bytes[owner] -= num_bytes
            del self._used[owner][key]
            if not self._used[owner]:
                del self._used[owner], self._bytes[owner]

    def _evict(self, owner: Hashable) -> None:
        self.pop(next(iter(self._used[owner])))
