"""The fuzzer sees every planted fault within a bounded number of schedules. The table is docs/mutations.md."""

import importlib

import pytest

from tests.serving.core.mutations import CORE
from tests.serving.core.mutations.registry import ROWS, Fault
from tests.serving.core.schedules import run_seed

BOUND = 6_000
LATE = (80,)
"""Faults that take thousands of schedules to show belong to the full tier."""
BY_FUZZER = [
    pytest.param(fault, marks=[pytest.mark.full] if number in LATE else [])
    for number, fault in sorted(CORE.items())
    if fault.seen_by is None
]


def caught_after(fault: Fault, bound: int = BOUND) -> tuple[int, str] | None:
    """The first seed that fails with the fault planted, and how; None if none does."""
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        for seed in range(bound):
            try:
                run_seed(seed)
            except Exception as error:
                return seed, f"{type(error).__name__}: {error}"
    return None


@pytest.mark.parametrize("fault", BY_FUZZER, ids=str)
def test_fuzzer_sees(fault: Fault) -> None:
    found = caught_after(fault)
    assert found is not None, f"{fault.name}: {fault.text}: not seen in {BOUND} schedules"
    print(f"{fault.name}: {fault.text}: seed {found[0]}: {found[1][:100]}")


@pytest.mark.parametrize("fault", [fault for fault in CORE.values() if fault.seen_by], ids=str)
def test_a_test_sees(fault: Fault) -> None:
    assert fault.seen_by is not None
    module, name = fault.seen_by
    test = getattr(importlib.import_module(f"tests.serving.core.{module}"), name)
    test()
    with pytest.MonkeyPatch.context() as patch:
        fault.plant(patch)
        with pytest.raises(AssertionError):
            test()


def test_every_row_of_the_table_is_planted() -> None:
    assert {name for name in ROWS if name.isdigit()} == set(map(str, CORE))
