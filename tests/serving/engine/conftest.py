"""One harness for all tests of the engine."""

import pytest


@pytest.fixture(scope="session")
def harness():
    from tests.support.engines.engine_harness import EngineHarness

    return EngineHarness()


@pytest.fixture(scope="module")
def maker(harness):
    from tests.support.engines.replicas import ReplicaMaker

    return ReplicaMaker(harness)


@pytest.fixture(scope="module")
def llm(harness):
    """The harness's engine as users of the library have it."""
    from serving import LLM
    from tests.support.engines.engines import use_widest_steps

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("serving.engine.llm.build_engine", harness.build)
        made = LLM("anything", **harness.flags)
    use_widest_steps(made.engine)
    return made


@pytest.fixture(scope="module")
def quick_compilation():
    """Programs of engines are few, compile fast, leave sampling out until a request samples, and are saved."""
    from tests.support.engines.step_programs import few_programs, shared_programs

    with few_programs(shared_programs):
        yield


@pytest.fixture
def few_tokens_are_divided(monkeypatch):
    """Prefill divides its tokens over the devices, also by pairs, as it does with many tokens."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)
    for rule in ("is_less_work", "exchanges_less"):
        monkeypatch.setattr(f"mamba_jax.layout.shares.{rule}", lambda *_: True)
