"""Planted faults by number. Each replaces one function or one rule; the fuzzer, or a named test, must see it.

What a fault is, which edge cases it stands for and who sees it is in docs/mutations.md.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Patch = pytest.MonkeyPatch
TABLE = (Path(__file__).parents[4] / "docs" / "mutations.md").read_text()
ROW = r"^\| ([C-Z]?\d+) \| ([^|]+) \|(?: [^|]+ \| ([^|]+) \|)?$"
ROWS = {name: row for name, *row in re.findall(ROW, TABLE, re.MULTILINE)}
"""By a fault's name in the page: what it is, and, where the page says so, who sees it."""


@dataclass(frozen=True)
class Fault:
    """A planted fault."""

    name: str
    """The number of a fault of the host policy, or D or S and that of one of the device's side or of a split."""
    plant: Callable[[Patch], None]
    compiles: str | None = None
    """The programs that it changes, such as `decode`; None: it changes only what the host does."""

    def __post_init__(self) -> None:
        assert self.name in ROWS, f"fault {self.name} is not in docs/mutations.md"

    def __str__(self) -> str:
        return f"{self.name}-{self.plant.__name__}"

    @property
    def text(self) -> str:
        """What is wrong."""
        return ROWS[self.name][0]

    @property
    def seen_by(self) -> tuple[str, str] | None:
        """The test (module, function) that sees it, as it costs time or memory and not tokens; None: the fuzzer."""
        found = re.fullmatch(r"`(test_\w+)\.py` `(test_\w+)`", ROWS[self.name][1])
        return (found[1], found[2]) if found else None


CORE: dict[int, Fault] = {}


def replacing(owner: Any, name: str, *others: Any) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Makes a plant of a function that is called in the place of `owner.name` (and of the same in `others`).

    The original comes as its first argument.
    """

    def decorate(change: Callable[..., Any]) -> Callable[[Patch], None]:
        def plant(patch: Patch) -> None:
            whole = getattr(owner, name)
            for place in (owner, *others):
                patch.setattr(place, name, lambda *args, **more: change(whole, *args, **more))

        plant.__name__ = name if change.__name__ == "<lambda>" else change.__name__
        return plant

    return decorate


def mutation(
    number: int, *where: Any, table: dict[int, Fault] = CORE, kind: str = "", compiles: str | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a fault: a function that takes pytest's monkeypatch, or a change of `where`.

    `where`: owner, name and further owners, see `replacing`. `kind`: what its name has before the number.
    """

    def register(change: Callable[..., Any]) -> Callable[..., Any]:
        assert number not in table
        table[number] = Fault(f"{kind}{number}", replacing(*where)(change) if where else change, compiles)
        return change

    return register
