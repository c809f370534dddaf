"""Finds the message in which a conversation differs from an earlier one, so that users see why nothing is reused."""

from __future__ import annotations

import json
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any

_CLIENTS, _CONVERSATIONS, _MESSAGES = 64, 16, 512
"""Maximum number of clients that are remembered, of each one's latest conversations, and of the messages of each."""


def message_digests(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> tuple[int, ...]:
    """Returns numbers for the tools and for each message, equal for equal ones in the same process."""
    texts = [each["content"] if isinstance(each.get("content"), str) else "" for each in messages[:_MESSAGES]]  # quick
    rest = [each if not text else {**each, "content": ""} for each, text in zip(messages, texts, strict=False)]
    written = (json.dumps(each, sort_keys=True, default=str) for each in (tools, *rest))
    return tuple(map(hash, zip(("", *texts), written, strict=True)))


class ChangedPrefixes:
    """The latest conversations of each client."""

    def __init__(self) -> None:
        self._seen: OrderedDict[object, deque[tuple[int, ...]]] = OrderedDict()

    def note(self, digests: tuple[int, ...], client: object) -> str | None:
        """Records a conversation. If it has most of the later messages of the one with the longest equal beginning,
        returns where it differs first: "message 0" or "the tools"."""
        seen = self._seen.setdefault(client, deque(maxlen=_CONVERSATIONS))
        self._seen.move_to_end(client)
        if len(self._seen) > _CLIENTS:
            self._seen.popitem(last=False)
        first, later = -1, list[bool]()
        for earlier in seen:
            same = [a == b for a, b in zip(digests, earlier, strict=False)]
            if (length := [*same, False].index(False)) > first:
                first, later = length, same[length:]
        seen.append(digests)
        if 2 * sum(later) <= len(later):
            return None
        return f"message {first - 1}" if first else "the tools"
