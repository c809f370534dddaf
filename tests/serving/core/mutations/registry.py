"""Planted faults by number. Each replaces one function or one rule; the fuzzer, or a named test, must see it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A fault, the lines of the list of edge cases that it stands for, and who sees it."""

    number: int
    fault: str
    cases: str
    plant: Callable[[Patch], None]
    seen_by: str = "fuzzer"
    """Or the test (module:function) that does: the fault costs time or memory, not tokens."""


CORE: dict[int, Mutation] = {}
"""`CORE[n]` is what the table in docs/mutations.md calls number n."""


def mutation(
    number: int, fault: str, cases: str, seen_by: str = "fuzzer"
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a fault, a function that takes pytest's monkeypatch, under its number."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert number not in CORE
        CORE[number] = Mutation(number, fault, cases, plant, seen_by)
        return plant

    return register


def replacing(owner: Any, name: str, *others: Any) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Makes a plant of a function that is called in the place of `owner.name` (and of the same in `others`).

    The original comes as its first argument.
    """

    def decorate(change: Callable[..., Any]) -> Callable[[Patch], None]:
        def plant(patch: Patch) -> None:
            whole = getattr(owner, name)
            for place in (owner, *others):
                patch.setattr(place, name, lambda *args, **more: change(whole, *args, **more))

        plant.__name__ = change.__name__
        return plant

    return decorate
