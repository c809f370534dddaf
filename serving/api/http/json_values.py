"""An estimate of what parsing a JSON text costs, from its bytes alone.

Python's parser and pydantic hold the interpreter lock while they run: 8 MB take 20 ms as one long string, and 20 s (and
gigabytes) as three million empty objects. So a body with too many values is refused before it is parsed.
"""

from __future__ import annotations

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
