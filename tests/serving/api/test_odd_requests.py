"""Odd requests get an answer below 500, from a server and through a router, both in this process."""

import contextlib
import time

import httpx
import pytest

from serving.split.router.app import create_router
from serving.split.settings import RouterSettings
from tests.support.servers.hostile_requests import HOSTILE
from tests.support.servers.live_server import running

ODD = (
    "headers that end with white space", "headers with bytes above 0x7f", "heads at and above the limit",
    "calls of wrong types", "arguments that are no JSON", "calls that a model writes wrongly",
    "values of wrong types to responses", "schemas of wrong types for a forced call", "values that are nested deeply",
    "messages that are nested deeply",
)  # fmt: skip


@pytest.fixture(scope="module")
def front(server):
    settings = RouterSettings.create(decode=(server.url,), routing="affinity", log_requests=False)
    app = create_router(settings)
    with running(app, settings, leave=app.state.relay.leave) as (_, url):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(url + "/ready").status_code == 200:
                    break
            time.sleep(0.05)
        yield url


@pytest.mark.parametrize("place", ["server", "router"])
@pytest.mark.parametrize("hostile", [{each.name: each for each in HOSTILE}[name] for name in ODD], ids=ODD)
def test_no_odd_request_gives_a_server_error(server, front, hostile, place):
    answers = hostile.send(server.url if place == "server" else front)
    assert answers <= hostile.allowed, answers
    status = httpx.get(front + "/status").json()
    assert all(worker["up"] for worker in status["decode"])
