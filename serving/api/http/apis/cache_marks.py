"""Marks of the prefix cache: those of clients, in both vendors' forms, and their places in the text of a conversation.

Anthropic's `cache_control` and OpenAI's `prompt_cache_breakpoint` stand on parts of messages. Each marks the end of a
prefix that the client will send again; docs/engine.md tells what the engine does with marks.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from checkpoints.text.chat import ChatTemplateError
from checkpoints.text.parts import part_text
from serving.api.http.errors import ApiError
from serving.api.http.protocol.chat import ChatRequest
from serving.core.cache.retention import LONGEST_TTL
from serving.engine.requests.conversations import TURN_SECONDS, chat_positions, place_of, shared_length

TOOLS = "tools_cache_control"
"""Field of a converted request: the mark at the end of its tools."""
_MOST = 4
"""Maximum number of marks of a client; OpenAI's API uses the last ones, Anthropic's refuses more."""
_DEFAULTS = {"cache_control": "5m", "prompt_cache_breakpoint": "30m"}
"""By the field of a mark: its time, if the mark has none."""
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}
_PROBE = "\ue000"


def marks_of(part: Any) -> dict[str, Any]:
    """Returns the fields of a part that mark its end."""
    return {name: part[name] for name in _DEFAULTS if isinstance(part, Mapping) and part.get(name)}


def with_marks(content: Any, part: Any) -> Any:
    """Returns content of a message whose last part has the marks of `part`."""
    if not (marks := marks_of(part)):
        return content
    parts = [*content] if isinstance(content, list) else [{"type": "text", "text": content or ""}]
    return [*parts[:-1], {**parts[-1], **marks}] if parts else parts


def seconds_of(marks: Mapping[str, Any], ttl: str | None = None) -> float:
    """Returns the time of a mark in seconds; `ttl`: that of the request. Refuses other spellings than `5m` and `1h`."""
    (name, value), *_ = marks.items()
    written = (value.get("ttl") if isinstance(value, Mapping) else None) or ttl or _DEFAULTS[name]
    matched = re.fullmatch(r"(\d{1,5})([smh])", written) if isinstance(written, str) else None
    seconds = int(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    if not 0 < seconds <= LONGEST_TTL:
        raise ApiError(
            400, f"{name}: ttl must be like 5m or 1h, and at most 24h, got {str(written)[:20]!r}", param=name
        )
    return seconds


def client_marks(request: ChatRequest, messages: Sequence[Mapping[str, Any]]) -> list[tuple[int, int, float]]:
    """Returns the marks in the messages of a request: the message, the part and the time of each. Those of tools have
    message -1.

    Raises:
        ApiError: a time is invalid, or there are more than 4 of Anthropic's marks.
    """
    extra = request.model_extra or {}
    options = request.prompt_cache_options
    found = [(-1, 0, marks)] if (marks := marks_of(extra.get(TOOLS))) else []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            found += [(i, j, marks) for j, part in enumerate(content) if (marks := marks_of(part))]
    if sum("cache_control" in marks for _, _, marks in found) > _MOST:
        raise ApiError(400, f"cache_control: at most {_MOST} blocks may have it, found {len(found)}", param="messages")
    ttl = None if options is None else options.ttl
    return [(i, j, seconds_of(marks, ttl)) for i, j, marks in found[-_MOST:]]


def places_of(
    marks: Sequence[tuple[int, int, float]],
    render: Callable[..., str],
    messages: Sequence[dict[str, Any]],
    text: str,
    /,
    **options: Any,
) -> dict[int, float | None]:
    """Returns the places to mark in the text of a conversation, in characters, with their times: those of the client,
    the end of tools and system text, and the end of the history. `render`: as for `chat_positions`."""
    found = chat_positions(render, messages, text, **options)
    longest = max((seconds for *_, seconds in marks), default=0.0)
    if marks:  # the client's own marks keep its turns
        found = {place: None if ttl in (None, TURN_SECONDS) else max(ttl, longest) for place, ttl in found.items()}
    own = [mark for mark in marks if mark[0] >= 0]
    parts = [messages[i]["content"][j] for i, j, _ in own]
    begins, together = [place_of(part, text) for part in parts], list[str]()
    if None in begins and len(own) > 1:  # one rendering shows all, unless the template changes the text around a probe
        with contextlib.suppress(ChatTemplateError):
            together = render(_probed(messages, own), **options).split(_PROBE)
    if None not in begins:
        places = [begin + len(part_text(part)) for begin, part in zip(begins, parts, strict=True) if begin is not None]
    elif len(together) == len(own) + 1 and "".join(together) == text:
        places = [*itertools.accumulate(map(len, together[:-1]))]
    else:
        places = []
        with contextlib.suppress(ChatTemplateError):
            for mark in own:
                places.append(shared_length(text, render(_probed(messages, [mark]), **options)))
    for place, (*_, seconds) in zip(places, own, strict=False):
        found[place] = max(found.get(place) or 0.0, seconds)
    return found


def _probed(messages: Sequence[dict[str, Any]], marks: Sequence[tuple[int, int, float]]) -> list[dict[str, Any]]:
    """Returns messages with a probe at the end of each marked part."""
    probed = [*messages]
    for i, j, _ in marks:
        parts = [*probed[i]["content"]]
        parts[j] = {"type": "text", "text": part_text(parts[j]) + _PROBE}
        probed[i] = {**probed[i], "content": parts}
    return probed
