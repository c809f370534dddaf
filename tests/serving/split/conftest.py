"""What tests of a router that follows events begin with."""

import socketserver

import pytest


@pytest.fixture(autouse=True)
def _listeners_end_soon(monkeypatch):
    """A transport's listener ends when it next looks whether it shall: at once, not after half a second."""
    monkeypatch.setattr(socketserver.BaseServer.serve_forever, "__defaults__", (0.02,))


@pytest.fixture
def publish_soon(monkeypatch):
    """Streams of events are read at once, and begun again at once."""
    monkeypatch.setattr("serving.split.router.event_followers._AGAIN", 0.05)
    monkeypatch.setattr("serving.split.http.events._LOOK", 0.01)
