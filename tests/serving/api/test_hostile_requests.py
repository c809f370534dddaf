"""One hostile request: it ends, nobody else notices, and what the server holds stays bounded."""

import pytest

from tests.support import processes
from tests.support.hostile_requests import HOSTILE, check_that_nobody_notices

BOUNDS = ("--header-timeout=2", "--body-timeout=3", "--grammar-timeout=2", "--no-log-requests")


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    found = processes.worker(
        "", tmp_path_factory.mktemp("hostile"), *BOUNDS, "--warmup", max_model_len=4096, num_pages=1100
    )
    found.wait_until_ready(900)
    yield found
    found.close()


@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda hostile: hostile.name)
def test_nobody_notices(process, hostile):
    check_that_nobody_notices(hostile, process.url, [process.process.pid])
