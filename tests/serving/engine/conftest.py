"""One harness for all tests of the engine."""

import pytest

from tests.support.engine_harness import EngineHarness


@pytest.fixture(scope="session")
def harness() -> EngineHarness:
    return EngineHarness()
