"""The text of a message's parts."""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Mapping
from typing import Any

_MEDIA = ("image_url", "input_audio", "audio_url", "video_url", "image", "audio", "video", "file")


def _is_media(value: Any) -> bool:
    """Returns whether a field of a part without a type has the data or the address of a picture, a sound or a file."""
    if isinstance(value, Mapping):
        return not value.keys().isdisjoint(("url", "data", "file_data", "file_id"))
    return isinstance(value, str) and value.startswith("data:")


def part_text(part: Any) -> str:
    """Returns the text of one part of a message, in the form of any API; of other parts, a text that names them."""
    if not isinstance(part, Mapping):
        return part if isinstance(part, str) else ""
    for name in ("text", "refusal", "thinking"):
        if isinstance(part.get(name), str):
            return part[name]
    untyped = next((name for name in _MEDIA if "type" not in part and _is_media(part.get(name))), None)
    if "type" not in part and "content" not in part and untyped is None:  # a tool's result
        return json.dumps(part, ensure_ascii=False, default=str).encode(errors="replace").decode()
    kind = str(part.get("type") or untyped or "part")[:40]
    if kind.endswith("text"):
        return ""
    if kind == "tool_use":
        return f"[{kind}] {part_text({name: part.get(name) for name in ('name', 'input')})}"
    source = part.get("source") or part.get("file") or part
    if not isinstance(source, Mapping):  # the address of a search result
        source = part
    if kind == "tool_reference":
        return f"[tool {str(part.get('tool_name') or part.get('name') or '')[:200]}]"
    if isinstance(source.get("content"), list):  # a document or a result of several parts
        return "\n".join(part_text(each) for each in source["content"] if each is not part)
    data, media = source.get("data") or source.get("file_data"), str(source.get("media_type") or "")
    if isinstance(source.get("content"), str):
        return source["content"]
    if isinstance(data, str):
        if source.get("type") == "text":
            return data
        if data.startswith("data:"):
            media, _, data = data[len("data:") :].partition(",")
        if media.startswith(("text/", "application/json")):
            with contextlib.suppress(ValueError):
                return base64.b64decode(data, validate=True).decode()
    title = source.get("filename") or part.get("title")
    short = next((word for word in ("image", "audio", "video", "file", "document") if word in kind), kind)
    return f"[{short}{f' {str(title)[:200]}' if title else ''} omitted]"
