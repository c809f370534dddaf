"""Stores responses of `/v1/responses` in memory, within limits, so that conversations can continue from them."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter, OrderedDict
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
    items: Sequence[dict[str, Any]] = ()
    """The items of its input, without those of earlier responses."""

    @property
    def num_bytes(self) -> int:
        """Approximate size. Conversations that share their beginnings each count in full."""
        return len(self.response) + len(json.dumps([self.messages, self.items]))


class ResponseStore:
    """Stores responses. Any thread may use it.

    At a limit, evicts the least recently used response of the key that uses most of it, so that no key loses its share
    to another.

    Args:
        most: maximum number of responses.
        most_bytes: maximum size of all responses; a larger response is not stored.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._stored: dict[bytes, OrderedDict[str, tuple[StoredResponse, int]]] = {}
        """Responses and their sizes by owner, the least recently used first."""
        self._bytes = Counter[bytes]()
        """Bytes by owner."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return sum(map(len, self._stored.values()))

    @property
    def num_bytes(self) -> int:
        """Size of all responses."""
        return self._bytes.total()

    def put(self, response_id: str, stored: StoredResponse) -> None:
        """Stores a response, unless it is larger than the limit."""
        size = stored.num_bytes
        if size > self._most_bytes or not self._most:
            return
        with self._lock:
            self._stored.setdefault(stored.owner, OrderedDict())[response_id] = stored, size
            self._bytes[stored.owner] += size
            while len(self) > self._most:
                self._remove(max(self._stored, key=lambda owner: len(self._stored[owner])))
            while self.num_bytes > self._most_bytes:
                self._remove(max(self._bytes, key=self._bytes.__getitem__))

    def get(self, response_id: str, key: str | None) -> StoredResponse | None:
        """Returns the response with this id, if it was created with this key and is still stored."""
        with self._lock:
            own = self._stored.get(owner_of(key), OrderedDict())
            if response_id not in own:
                return None
            own.move_to_end(response_id)
            return own[response_id][0]

    def delete(self, response_id: str, key: str | None) -> bool:
        """Deletes a response. Returns False if `get` finds no such response."""
        with self._lock:
            found = response_id in self._stored.get(owner_of(key), ())
            if found:
                self._remove(owner_of(key), response_id)
            return found

    def _remove(self, owner: bytes, response_id: str | None = None) -> None:
        """Removes a response of an owner, by default the least recently used one."""
        own = self._stored[owner]
        self._bytes[owner] -= own.pop(next(iter(own)) if response_id is None else response_id)[1]
        if not own:
            del self._stored[owner], self._bytes[owner]


def owner_of(key: str | None) -> bytes:
    """Returns the digest of a key."""
    return hashlib.sha256((key or "").encode()).digest()
