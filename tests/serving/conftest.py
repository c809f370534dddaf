"""One server for all tests of HTTP and of the terminal, whose programs are compiled once; how coroutines are tests.

Imports are in the fixture: tests of host policy need neither JAX nor the server.
"""

import asyncio
import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from serving.engine.structured.grammars import Grammars
    from tests.support.servers.live_server import LiveServer


@pytest.fixture(scope="session")
def server() -> "Iterator[LiveServer]":
    from tests.support.servers.live_server import LiveServer, make_engine

    server = LiveServer(make_engine())
    server.wait_until_ready()
    yield server
    server.close()


@pytest.fixture(scope="session")
def grammars() -> "Grammars":
    """Those of the demo model."""
    from checkpoints.tokenizer import load_tokenizer
    from serving.engine.structured.grammars import Grammars

    tokenizer = load_tokenizer("demo")
    return Grammars(tokenizer, tokenizer.vocab_size, (2, 4))


def pytest_pyfunc_call(pyfuncitem):
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
    return True
