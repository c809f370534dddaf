"""One server for all tests of HTTP and of the terminal: its programs are compiled once."""

from collections.abc import Iterator

import pytest

from tests.support.live_server import LiveServer, make_engine


@pytest.fixture(scope="session")
def server() -> Iterator[LiveServer]:
    server = LiveServer(make_engine())
    server.wait_until_ready()
    yield server
    server.close()
