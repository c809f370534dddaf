"""One harness for all tests of the engine."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.engine_harness import EngineHarness


@pytest.fixture(scope="session")
def harness() -> "EngineHarness":
    from tests.support.engine_harness import EngineHarness

    return EngineHarness()


@pytest.fixture
def quick_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes most of the time of tests that make several engines, and the programs' speed does not matter."""
    from functools import partial

    from mamba_jax.programs import StepPrograms
    from tests.support.engines import QUICK_COMPILE

    quick = partial(StepPrograms, compiler_options=QUICK_COMPILE)
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", quick)
