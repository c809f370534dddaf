"""Stores responses of `/v1/responses` in memory, within limits, so that conversations can continue from them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from serving.engine.fair_lru import FairLru


@dataclass(frozen=True)
class StoredResponse:
    """One stored response."""

    messages: Sequence[dict[str, Any]]
    """The whole conversation, including this response, without instructions."""
    response: bytes
    """The response as JSON."""
    owner: bytes
    """Digest of the key that created it; requests with another key cannot read it."""
    items: Sequence[dict[str, Any]] = ()
    """The items of its input, without those of earlier responses."""


class ResponseStore:
    """Stores at most `most` responses of at most `most_bytes` together, limits that keys share. A larger response is
    not stored. Any thread may use it."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self.stored = FairLru[StoredResponse](most, most_bytes)
        self._lock = threading.Lock()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the limit."""
        # Approximate: conversations that share their beginnings each count in full.
        size = len(stored.response) + len(json.dumps([stored.messages, stored.items]))
        with self._lock:
            self.stored.put(response_id, stored, stored.owner, size)

    def get(self, response_id: str, key: str | None) -> StoredResponse | None:
        """Returns the response with this id, if it was created with this key and is still stored."""
        with self._lock:
            stored = self.stored.get(response_id)
        return stored if stored is not None and stored.owner == owner_of(key) else None

    def delete(self, response_id: str, key: str | None) -> bool:
        """Deletes a response. Returns False if `get` finds no such response."""
        if self.get(response_id, key) is None:
            return False
        with self._lock:
            self.stored.pop(response_id)
        return True


def owner_of(key: str | None) -> bytes:
    """Returns the digest of a key."""
    return hashlib.sha256((key or "").encode()).digest()
