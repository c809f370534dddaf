"""One server for all tests of HTTP and of the terminal: its programs are compiled once.

Imports are in the fixture: tests of host policy need neither JAX nor the server.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.support.servers.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> "Iterator[LiveServer]":
    from tests.support.servers.live_server import LiveServer, make_engine

    server = LiveServer(make_engine())
    server.wait_until_ready()
    yield server
    server.close()
