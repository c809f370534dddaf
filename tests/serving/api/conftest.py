"""One server for all tests of this room: its programs are compiled once."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from live_server import LiveServer, make_engine


@pytest.fixture(scope="session")
def server():
    server = LiveServer(make_engine())
    server.wait_until_ready()
    yield server
    server.close()
