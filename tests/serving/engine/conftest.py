"""One harness for all tests of the engine."""

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.engine_harness import EngineHarness


@pytest.fixture(scope="session")
def harness() -> "EngineHarness":
    from tests.support.engine_harness import EngineHarness

    return EngineHarness()
