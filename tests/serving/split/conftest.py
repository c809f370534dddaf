"""What every test of the split begins with."""

import random

import pytest


@pytest.fixture(autouse=True)
def _nothing_offered_before():
    """What a test leaves with the transport, a planted fault's for example, is not there for the next."""
    from tests.support.direct_transport import DirectTransport

    DirectTransport("here").offered.clear()


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)
