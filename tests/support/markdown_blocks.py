"""The fenced blocks of a Markdown page, in order."""

from __future__ import annotations

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
    found: list[Block] = []
    inside: list[str] | None = None
    language, begin = "", 0
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```"):
            if inside is None:
                inside, language, begin = [], line[3:].strip(), number + 1
            else:
                found.append(Block(language, "".join(f"{part}\n" for part in inside), begin))
                inside = None
        elif inside is not None:
            inside.append(line)
    if inside is not None:
        raise ValueError(f"{page.name}: the fence at line {begin - 1} is never closed")
    return found
