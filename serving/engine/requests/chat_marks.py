"""Marks of a conversation: the ends of its tools and system text, and of its history before the model's turn.

A chat template may drop or move text when the next turn is rendered: thoughts, or the beginning of the model's turn. So
the end of a prompt is often not a prefix of the next one. These two places are found by rendering again.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

from checkpoints.text.chat import ChatTemplateError
from checkpoints.tokenizer import Tokenizer
from serving.core import Mark

LEAST_TOKENS = 32
"""Minimum position of a mark: fewer tokens are computed as quickly as a state is read."""
SYSTEM_SECONDS = 300.0
"""How long the state at the end of tools and system text is kept after its last use."""
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
        probe = [*system, {"role": "user", "content": _PROBE}]
        with contextlib.suppress(ChatTemplateError):
            found[shared_length(text, render(probe, **options))] = SYSTEM_SECONDS
    if options.get("add_generation_prompt", True) and not options.get("continue_final_message"):
        with contextlib.suppress(ChatTemplateError):
            history = render(messages, **{**options, "add_generation_prompt": False})
            found.setdefault(shared_length(text, history), None)
    return found


def marks_at(positions: Mapping[int, float | None], ends: Sequence[int]) -> tuple[Mark, ...]:
    """Returns marks at the last tokens that end at or before these characters of a text.

    Args:
        positions: numbers of characters, each with the mark's time.
        ends: the end of each token in the text, ascending (`Tokenizer.encode_with_ends`).
    """
    found = (Mark(bisect_right(ends, place), ttl) for place, ttl in positions.items())
    return tuple(mark for mark in found if LEAST_TOKENS <= mark.position < len(ends))


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
