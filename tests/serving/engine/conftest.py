"""One harness for all tests of the engine."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from serving import LLM
    from serving.engine.engine import Engine
    from tests.support.engines.engine_harness import EngineHarness
    from tests.support.engines.replicas import ReplicaMaker


@pytest.fixture(scope="session")
def harness() -> "EngineHarness":
    from tests.support.engines.engine_harness import EngineHarness

    return EngineHarness()


@pytest.fixture(scope="module")
def maker(harness: "EngineHarness") -> "ReplicaMaker":
    from tests.support.engines.replicas import ReplicaMaker

    return ReplicaMaker(harness)


@pytest.fixture(scope="module")
def llm(harness: "EngineHarness") -> "LLM":
    """The harness's engine as users of the library have it."""
    from serving import LLM
    from tests.support.engines.engines import use_widest_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.engine.llm.build_engine", harness.build)
        made = LLM("anything", **harness.flags)
    use_widest_steps(made.engine)
    return made


@pytest.fixture(scope="module")
def quick_compilation() -> "Iterator[None]":
    """Programs of engines are few, compile fast, leave sampling out until a request samples, and are saved."""
    from tests.support.engines.step_programs import few_programs, shared_programs

    with few_programs(shared_programs):
        yield


@pytest.fixture
def few_tokens_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill divides its tokens over the devices, also by pairs, as it does with many tokens."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)
    for rule in ("is_less_work", "exchanges_less"):
        monkeypatch.setattr(f"mamba_jax.layout.shares.{rule}", lambda *_: True)


@pytest.fixture(scope="module")
def structured(harness: "EngineHarness") -> "Callable[[], Engine]":
    """Makes engines that follow grammars of letters."""
    from serving.config import EngineConfig
    from serving.engine.assembly.build import assemble
    from tests.support.engines.engines import use_widest_steps
    from tests.support.engines.step_programs import shared_programs
    from tests.support.models.letter_tokens import EOS, letters

    config = EngineConfig.create(**harness.flags, enable_structured_outputs=True)
    programs = shared_programs(harness.model, tile_size=harness.flags["tile_size"], greedy=False)

    def make() -> "Engine":
        built = assemble(config, harness.model, tokenizer=letters(), eos_token_ids=(EOS,), programs=programs)
        use_widest_steps(built.engine)
        return built.engine

    return make
