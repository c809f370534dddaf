"""The handshake over HTTP: a worker that does not fit is refused with one line on both sides."""

import asyncio
import logging
import socket
import threading
from types import SimpleNamespace

import pytest
import uvicorn
from fastapi import FastAPI

from serving.api.http import errors
from serving.split.http.peer import HttpPeer
from serving.split.http.prefill_routes import prefill_router
from serving.split.manifest import ManifestMismatch
from serving.split.wire import SplitError, Want
from tests.serving.split.test_manifest import BASE, other
from tests.support.processes import free_port


class Side:
    """A prefill side that has a manifest and no engine."""

    lease = 30.0
    kept = 0
    worker = SimpleNamespace(manifest=BASE, close=lambda: None)

    def sweep(self):
        return 0

    def offer(self, want):
        raise SplitError(f"there is no state {want.id} (any more)")


class NoEngine:
    async def call(self, function):
        return function(None)

    def tell(self, function):
        function(None)


@pytest.fixture(scope="module")
def url():
    app = FastAPI()
    errors.install(app)
    app.include_router(prefill_router(Side(), "http://here"))
    app.state.context = SimpleNamespace(engine=NoEngine())
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


WANT = Want(id="x", start=0, unit=16, layers=1, transport="tcp", manifest=BASE.digest)


def test_hands_are_shaken(url):
    async def run():
        peer = await HttpPeer.connect(url, other(page_size=16))
        assert peer.manifest == BASE
        with pytest.raises(SplitError, match="there is no state x"):
            await asyncio.to_thread(peer.offer, WANT, 5.0)
        await asyncio.to_thread(peer.release, "x", wanted=False)  # never raises
        await peer.close()

    asyncio.run(run())


@pytest.mark.parametrize("fields", [{"ssm_dtype": "bfloat16"}, {"model": "another"}])
def test_a_mismatch_is_one_line_on_both_sides(url, fields, caplog):
    with caplog.at_level(logging.ERROR), pytest.raises(ManifestMismatch) as caught:
        asyncio.run(HttpPeer.connect(url, other(**fields)))
    (name,) = fields
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    (record,) = [each for each in caplog.records if "refused" in each.getMessage()]
    assert name in record.getMessage()
    assert "\n" not in record.getMessage()


def test_nobody_there():
    with pytest.raises(SplitError, match="cannot be reached"):
        asyncio.run(HttpPeer.connect(f"http://127.0.0.1:{free_port()}", BASE))
