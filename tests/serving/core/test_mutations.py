"""The fuzzer sees every planted fault within a bounded number of schedules. The table is docs/mutations.md."""

import pytest

from tests.serving.core.mutations import CORE, Mutation
from tests.serving.core.schedules import run_seed

BOUND = 3_000


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


@pytest.mark.parametrize("number", sorted(CORE))
def test_fault_is_caught(number: int) -> None:
    mutation = CORE[number]
    found = caught_after(mutation)
    assert found is not None, f"{number}: {mutation.fault}: not caught in {BOUND} schedules"
    print(f"{number}: {mutation.fault}: seed {found[0]}: {found[1][:100]}")
