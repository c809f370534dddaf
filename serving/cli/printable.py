"""Text from models and servers, made safe to print on a terminal."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters other than tab and newline, marks that reverse the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """The text without characters that a terminal obeys. What follows an escape character stays, as plain text."""
    return _CONTROLS.sub("", text)
