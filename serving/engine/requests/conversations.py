"""Conversations: the positions to mark in their prompts, and the message in which one differs from an earlier one."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from checkpoints.text.chat import ChatTemplateError
from checkpoints.text.parts import part_text
from checkpoints.tokenizer import Tokenizer
from serving.core.cache.retention import Mark

LEAST_TOKENS = 32
"""Minimum position of a mark: fewer tokens are computed as quickly as a state is read."""
SYSTEM_SECONDS = 300.0
"""How long the state at the end of tools and system text is kept after its last use."""
TURN_SECONDS = 600.0
"""The same of the state after a user's message. If the template drops the thoughts that follow, later turns continue
from it, although the conversation has gone on from there."""
_PROBE = "\ue000"
"""Content of a user's message that no conversation begins with."""

Messages = Sequence[Mapping[str, Any]]


def encode_marked(tokenizer: Tokenizer, messages: Messages, /, **options: Any) -> tuple[list[int], tuple[Mark, ...]]:
    """Returns the token ids of a conversation, and its marks. `options` are those of `Tokenizer.apply_chat_template`.

    Raises:
        ChatTemplateError: the template does not exist, or it rejects the conversation.
    """
    text = tokenizer.apply_chat_template(messages, **options)
    ids, ends = tokenizer.encode_with_ends(text)
    return ids, marks_at(chat_positions(tokenizer.apply_chat_template, messages, text, **options), ends)


def chat_positions(
    render: Callable[..., str], messages: Messages, text: str, /, **options: Any
) -> dict[int, float | None]:
    """Returns the places to mark in the text of a conversation, in characters, each with its time (`Mark.ttl`).
    `render`: as `Tokenizer.apply_chat_template`; a place that it refuses to render is left out."""
    found: dict[int, float | None] = {}
    system = list(takewhile(lambda message: message.get("role") in ("system", "developer"), messages))
    if system or options.get("tools"):
        content = messages[len(system)].get("content") if len(system) < len(messages) else None
        place = place_of(content[0] if isinstance(content, list) and content else content, text)
        if place is not None and system and (begin := place_of(system[-1].get("content"), text)) and begin > place:
            place = None  # the words of the user stand in the system text, too
        with contextlib.suppress(ChatTemplateError):
            if place is None:
                probe = [*system, {"role": "user", "content": _PROBE}]
                place = shared_length(text, render(probe, **options))
            found[place] = SYSTEM_SECONDS
    if options.get("add_generation_prompt", True) and not options.get("continue_final_message"):
        with contextlib.suppress(ChatTemplateError):
            history = render(messages, **{**options, "add_generation_prompt": False})
            of_user = bool(messages) and messages[-1].get("role") == "user"
            found.setdefault(shared_length(text, history), TURN_SECONDS if of_user else None)
    return found


def place_of(part: Any, text: str) -> int | None:
    """Returns where a part of a message begins in the text of its conversation; None unless it is there once."""
    words = part_text(part) if part else ""
    return text.index(words) if words and text.count(words) == 1 else None


def marks_at(positions: Mapping[int, float | None], ends: Sequence[int]) -> tuple[Mark, ...]:
    """Returns marks at the last tokens that end at or before these characters of a text.

    Args:
        positions: numbers of characters, each with the mark's time.
        ends: the end of each token in the text, ascending (`Tokenizer.encode_with_ends`).
    """
    found = ((bisect_right(ends, place), ttl) for place, ttl in positions.items())
    return tuple(Mark(position, ttl) for position, ttl in found if LEAST_TOKENS <= position < len(ends))


def shared_length(text: str, other: str) -> int:
    """Returns the number of characters at the beginning that two texts share."""
    low, high = 0, min(len(text), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


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
