"""The fuzzer sees every planted fault within a bounded number of schedules. The table is docs/mutations.md."""

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.serving.core.mutations import CORE, Mutation
from tests.serving.core.schedules import run_seed

BOUND = 6_000


def caught_after(mutation: Mutation, bound: int = BOUND) -> tuple[int, str] | None:
    """The first seed that fails with the fault planted, and how; None if none does."""
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(patch)
        for seed in range(bound):
            try:
                run_seed(seed)
            except Exception as error:
                return seed, f"{type(error).__name__}: {error}"
    return None


def number_id(number: int) -> str:
    """So that a failing test names its fault."""
    return f"{number}-{CORE[number].plant.__name__}"


LATE = (80,)
"""Faults that take thousands of schedules to show."""


def parameters(numbers: Iterable[int]) -> list[Any]:
    """Each fault's number as a test's parameter; those that show late belong to the full tier."""
    return [pytest.param(n, id=number_id(n), marks=[pytest.mark.full] if n in LATE else []) for n in sorted(numbers)]


@pytest.mark.parametrize("number", parameters(n for n in CORE if CORE[n].seen_by == "fuzzer"))
def test_fuzzer_sees(number: int) -> None:
    mutation = CORE[number]
    found = caught_after(mutation)
    assert found is not None, f"{number}: {mutation.fault}: not seen in {BOUND} schedules"
    print(f"{number}: {mutation.fault}: seed {found[0]}: {found[1][:100]}")


@pytest.mark.parametrize("number", parameters(n for n in CORE if CORE[n].seen_by != "fuzzer"))
def test_a_test_sees(number: int) -> None:
    mutation = CORE[number]
    module, name = mutation.seen_by.split(":")
    test = getattr(importlib.import_module(f"tests.serving.core.{module}"), name)
    test()
    with pytest.MonkeyPatch.context() as patch:
        mutation.plant(patch)
        with pytest.raises(AssertionError):
            test()


def test_table_is_complete() -> None:
    table = (Path(__file__).parents[3] / "docs" / "mutations.md").read_text()
    for number, mutation in CORE.items():
        assert re.search(rf"^\| {number} \| {re.escape(mutation.fault)} \|", table, re.MULTILINE), (
            f"{number} is not listed"
        )
