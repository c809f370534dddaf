"""One hostile request to a server, a router or a prefill worker: it ends, no other client notices, and what is held
stays bounded."""

import pytest

from tests.support.fleets.processes import router, running, worker
from tests.support.selection import slow
from tests.support.servers.bystander import check_bystanders_are_unaffected
from tests.support.servers.hostile_requests import HOSTILE

pytestmark = pytest.mark.full

BOUNDS = ("--header-timeout=2", "--body-timeout=3", "--no-log-requests")


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """URLs and processes: a server (that also decodes for the router), and a router in front of it."""
    folder = tmp_path_factory.mktemp("hostile")
    large = {"max_model_len": 4096, "num_pages": 1100}
    server, prefill = (
        worker(role, folder, *BOUNDS, "--grammar-timeout=2", "--warmup", **large) for role in ("decode", "prefill")
    )
    front = router([prefill], [server], folder, *BOUNDS)
    with running(server, prefill, front, seconds=900):
        yield {
            "server": (server.url, [server.process.pid]),
            "prefill worker": (prefill.url, [prefill.process.pid]),
            "router": (front.url, [each.process.pid for each in (front, server, prefill)]),
        }


@pytest.mark.parametrize("place", ["server", "router", slow("prefill worker")])
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_bystanders_are_unaffected(places, hostile, place):
    check_bystanders_are_unaffected(hostile, *places[place])
