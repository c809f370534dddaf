"""JSON from clients and models: the cost of parsing it, its depth, and the values that are accepted.

Python's parser and pydantic hold the interpreter lock while they run: 8 MB take 20 ms as one long string, and 20 s (and
gigabytes) as three million empty objects. The server therefore refuses a body with too many values before parsing it.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

MAX_DEPTH = 128
"""Maximum depth of a request's body and of a call's arguments. Serializers fail at about 250 levels."""
NUMBER, OTHER = 1, 10
"""Weights of a number and of any other value: Python must create and validate an object for each string, array and
object."""


def weight(body: bytes | bytearray, most: int) -> int:
    """Returns the weight of all values of a JSON text, including object keys. Above `most`, the result may be a lower
    bound that is still more than `most`.

    The result for bytes that are not JSON is arbitrary; the parser rejects them.
    """
    plain = _without_escapes(body)
    strings = plain.count(b'"') // 2
    if strings * OTHER > most:  # splitting would create an object for each string
        return strings * OTHER
    outside = b"".join(plain.split(b'"')[::2])
    return OTHER * (strings + outside.count(b"[") + outside.count(b"{")) + NUMBER * outside.count(b",")


def depth(text: bytes | bytearray) -> int:
    """Returns the depth of arrays and objects in a JSON text; the result is arbitrary for bytes that are not JSON."""
    plain = _without_escapes(text)
    level = deepest = 0
    for byte in b"".join(plain.split(b'"')[::2]).translate(None, delete=_NO_BRACKETS):
        level += 1 if byte in b"[{" else -1
        deepest = max(deepest, level)
    return deepest


def parse_written(text: str) -> Any:
    """Returns the value of a JSON text written by a model. Strings may contain control characters.

    Raises:
        ValueError: the text is not JSON (`NaN` and `Infinity` are not), contains a number that is too large, or is
            nested more than `MAX_DEPTH` levels deep.
    """
    if depth(text.encode("utf-8", "surrogatepass")) > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    return json.loads(text, strict=False, parse_constant=_refuse_constant, parse_float=_finite)


def has_half_characters(value: Any) -> bool:
    """Returns whether a text contains half a surrogate pair, which JSON can escape but UTF-8 cannot encode."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def well_formed(text: str) -> str:
    """Returns `text` with unpaired surrogates replaced, because UTF-8 cannot encode them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _without_escapes(text: bytes | bytearray) -> bytes:
    plain = bytes(text)
    return plain.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in plain else plain


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:20]} is too large")
    return value


def _refuse_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
