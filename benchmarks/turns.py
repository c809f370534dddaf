"""Measure several forms of the same work in alternating turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

Name = TypeVar("Name")
Value = TypeVar("Value")


def in_turns(forms: Mapping[Name, Callable[[int], Value]], turns: int, *, warmup: int = 1) -> dict[Name, list[Value]]:
    """Call each form once per turn; return the values of each form, one per turn.

    The speed of a machine changes over time, so each turn starts with another form. A form gets the number of the turn,
    which is negative for the `warmup` turns; their values are dropped.
    """
    names = list(forms)
    values: dict[Name, list[Value]] = {name: [] for name in names}
    for turn in range(-warmup, turns):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            value = forms[name](turn)
            if turn >= 0:
                values[name].append(value)
    return values


def timed(work: Callable[[], object]) -> Callable[[int], float]:
    """A form for `in_turns` that returns the seconds that `work` takes."""

    def form(turn: int) -> float:
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin

    return form


def ratio(values: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """The median of each turn's ratio to the baseline, with the range over the turns."""
    each = [value / other for value, other in zip(values, baseline, strict=True)]
    return {"ratio": round(statistics.median(each), 4), "least": round(min(each), 4), "most": round(max(each), 4)}
