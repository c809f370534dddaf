"""The fenced blocks of a Markdown page, in order."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """What stands between two fences, and the line of the page where it begins (counted from 1)."""

    language: str
    text: str
    line: int


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises `ValueError` for a fence that is never closed."""
    text = page.read_text(encoding="utf-8") + "\n"
    found = [*re.finditer(r"^```(.*)\n((?:.*\n)*?)(```|\Z)", text, re.MULTILINE)]
    if found and not found[-1][3]:
        line = text.count("\n", 0, found[-1].start()) + 1
        raise ValueError(f"{page.name}: the fence at line {line} is never closed")
    return [Block(each[1].strip(), each[2], text.count("\n", 0, each.start(2)) + 1) for each in found]
