"""Stores responses of `/v1/responses` in memory, within limits, so that conversations can continue from them."""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class StoredResponse:
    """One stored response."""

    messages: Sequence[dict[str, Any]]
    """The whole conversation, including this response, without instructions."""
    response: bytes
    """The response as JSON."""
    owner: bytes
    """Digest of the key that created it; requests with another key cannot read it."""

    @property
    def num_bytes(self) -> int:
        """Approximate size. Conversations that share their beginnings each count in full."""
        return len(self.response) + len(json.dumps(self.messages))


class ResponseStore:
    """Stores responses. Evicts the least recently used ones.

    Args:
        most: maximum number of responses.
        most_bytes: maximum size of all responses; a larger response is not stored.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the limit."""
        size = stored.num_bytes
        if size > self._most_bytes or not self._most:
            return
        self._stored[response_id] = (stored, size)
        self.num_bytes += size
        while len(self._stored) > self._most or self.num_bytes > self._most_bytes:
            _, (_, freed) = self._stored.popitem(last=False)
            self.num_bytes -= freed

    def get(self, response_id: str, key: str | None) -> StoredResponse | None:
        """Returns the response with this id, if it was created with this key and is still stored."""
        entry = self._stored.get(response_id)
        if entry is None or entry[0].owner != owner_of(key):
            return None
        self._stored.move_to_end(response_id)
        return entry[0]

    def delete(self, response_id: str, key: str | None) -> bool:
        """Deletes a response. Returns False if `get` finds no such response."""
        if self.get(response_id, key) is None:
            return False
        self.num_bytes -= self._stored.pop(response_id)[1]
        return True


def owner_of(key: str | None) -> bytes:
    """Returns the digest of a key."""
    return hashlib.sha256((key or "").encode()).digest()
