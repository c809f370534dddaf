"""One harness for all tests of the engine."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.engine.engine import Engine
    from tests.support.engines.engine_harness import EngineHarness


@pytest.fixture(scope="session")
def harness() -> "EngineHarness":
    from tests.support.engines.engine_harness import EngineHarness

    return EngineHarness()


@pytest.fixture
def quick_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling takes most of the time of tests that make several engines, and the programs' speed does not matter."""
    from functools import partial

    from mamba_jax.programs import StepPrograms
    from tests.support.engines.engines import QUICK_COMPILE

    quick = partial(StepPrograms, compiler_options=QUICK_COMPILE)
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", quick)


@pytest.fixture(scope="module")
def structured(harness: "EngineHarness") -> "Callable[[], Engine]":
    """Makes engines that follow grammars of letters."""
    from mamba_jax.programs import StepPrograms
    from serving.config import EngineConfig
    from serving.engine.assembly.build import assemble
    from tests.support.engines.engines import QUICK_COMPILE
    from tests.support.models.letter_tokens import EOS, letters

    config = EngineConfig.create(**harness.flags, enable_structured_outputs=True)
    programs = StepPrograms(harness.model, tile_size=harness.flags["tile_size"], compiler_options=QUICK_COMPILE)
    return lambda: assemble(config, harness.model, tokenizer=letters(), eos_token_ids=(EOS,), programs=programs).engine
