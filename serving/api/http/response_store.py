"""Answers of `/v1/responses` that conversations may go on from: in memory, within bounds, until the process ends."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Stored:
    """One of them."""

    messages: Sequence[dict[str, Any]]
    """The whole conversation, this answer included, without instructions."""
    response: bytes
    """The answer as it was given, JSON."""
    owner: bytes
    """Digest of the key that created it; requests with another key cannot read it."""

    @property
    def num_bytes(self) -> int:
        """What it takes, about; of conversations that share their beginnings, each counts the whole."""
        return len(self.response) + len(json.dumps(self.messages))


class ResponseStore:
    """The latest ones. The least recently used make room.

    Args:
        most: answers at most.
        most_bytes: of all of them; an answer that is larger is not kept at all.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[str, tuple[Stored, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response_id: str, stored: Stored) -> None:
        """Keep an answer, if it fits at all."""
        size = stored.num_bytes
        if size > self._most_bytes or not self._most:
            return
        self._kept[response_id] = (stored, size)
        self.num_bytes += size
        while len(self._kept) > self._most or self.num_bytes > self._most_bytes:
            _, (_, freed) = self._kept.popitem(last=False)
            self.num_bytes -= freed

    def get(self, response_id: str, key: str | None) -> Stored | None:
        """The answer of that id, if it was made with that key and is still there."""
        found = self._kept.get(response_id)
        if found is None or found[0].owner != owner_of(key):
            return None
        self._kept.move_to_end(response_id)
        return found[0]

    def delete(self, response_id: str, key: str | None) -> bool:
        """Forget an answer; False where there is none."""
        if self.get(response_id, key) is None:
            return False
        self.num_bytes -= self._kept.pop(response_id)[1]
        return True


def owner_of(key: str | None) -> bytes:
    """What is kept of a key."""
    return hashlib.sha256((key or "").encode()).digest()
