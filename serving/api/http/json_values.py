"""JSON of clients and models: what parsing costs, how deep it is nested, and which values may be passed on.

Python's parser and pydantic hold the interpreter lock while they run: 8 MB take 20 ms as one long string, and 20 s (and
gigabytes) as three million empty objects. So a body with too many values is refused before it is parsed.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Levels of arrays and objects in a request's body or in a call's arguments. Serialisers fail at about 250."""
NUMBER, OTHER = 1, 10
"""What a value counts as: strings, arrays and objects each become a Python object to create and validate."""


def weight(body: bytes | bytearray, most: int) -> int:
    """The weight of all values of a JSON text, object keys included; if that exceeds `most`, possibly less, but still
    more than `most`.

    Bytes that are not JSON get some number; the parser rejects them soon enough.
    """
    plain = bytes(body)
    if b"\\" in plain:
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = plain.count(b'"') // 2
    if strings * OTHER > most:  # splitting creates an object for each of them
        return strings * OTHER
    outside = b"".join(plain.split(b'"')[::2])
    return OTHER * (strings + outside.count(b"[") + outside.count(b"{")) + NUMBER * outside.count(b",")


def depth(text: bytes | bytearray) -> int:
    """Levels of arrays and objects in a JSON text; some number for bytes that are not JSON."""
    plain = bytes(text)
    if b"\\" in plain:
        plain = plain.replace(b"\\\\", b"").replace(b'\\"', b"")
    level = deepest = 0
    for byte in b"".join(plain.split(b'"')[::2]).translate(None, delete=_NO_BRACKETS):
        level += 1 if byte in b"[{" else -1
        deepest = max(deepest, level)
    return deepest


def parse_written(text: str) -> Any:
    """The value of a JSON text that a model has written. Control characters may stand in strings.

    Raises:
        ValueError: it is not JSON (`NaN` and `Infinity` are not), has a number that is too large, or is nested more
            than `MAX_DEPTH` levels deep.
    """
    if depth(text.encode("utf-8", "surrogatepass")) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return json.loads(text, strict=False, parse_constant=_refuse_constant, parse_float=_finite)


def well_formed(text: str) -> str:
    """A text with each half of a surrogate pair replaced: UTF-8 has no form for it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
