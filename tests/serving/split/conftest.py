"""What every test of the split begins with."""

import pytest


@pytest.fixture(autouse=True)
def _nothing_offered_before():
    """What a test leaves with the transport, a planted fault's for example, is not there for the next."""
    from tests.support.fleets.split_pair import DirectTransport

    DirectTransport("here").offered.clear()


@pytest.fixture
def publish_soon(monkeypatch):
    """Streams of events are read at once, and begun again at once."""
    monkeypatch.setattr("serving.split.router.event_followers._AGAIN", 0.05)
    monkeypatch.setattr("serving.split.http.events._LOOK", 0.01)
