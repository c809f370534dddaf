"""One harness for all tests of the engine."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from serving import LLM
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
