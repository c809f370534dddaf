"""`kill -9` at every stage of a request, one by one: right tokens or one clear error, and nothing stays with survivors.

Workers stop where they are told to (`stoppable_worker.py`), so that each is killed exactly there.
"""

import contextlib
import itertools
from concurrent.futures import Future, ThreadPoolExecutor

import openai
import pytest

from tests.support.fleets.processes import streamed
from tests.support.fleets.split_faults import TEXT, Fleet

pytestmark = pytest.mark.slow

LENGTH = 24


class StoppableFleet(Fleet):
    """A prefill worker, two decode workers and a router, each of which is restarted where it was killed."""

    def __init__(self, folder) -> None:
        super().__init__(folder, [{}], [{}, {}])
        self.pool = ThreadPoolExecutor(8)
        self.prompts = (f"{number} {TEXT}" for number in itertools.count())
        """That no worker has seen."""

    def ask(self, prompt: str) -> Future[list[int]]:
        """Begins a request."""
        return self.pool.submit(streamed, self.front, prompt, LENGTH)

    def mend(self) -> None:
        """Start anew what does not run; then wait until the router knows."""
        for each in self.workers:
            if each.process.poll() is not None:
                self.restart(each)
        if self.front.process.poll() is not None:
            self.front = self.route(port=self.front.port)
        self.begin()

    def decoding_worker(self):
        """The decode worker that has a request; the other one."""
        busy = [each for each in self.front.get("/status")["decode"] if each["load"]]
        (found,) = [each for each in self.decode if each.url == busy[0]["url"]]
        return found, next(each for each in self.decode if each is not found)


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory):
    with contextlib.closing(StoppableFleet(tmp_path_factory.mktemp("stages"))) as fleet:
        yield fleet


@pytest.fixture
def fleet(whole_fleet):
    for left in whole_fleet.stages.folder.glob("*.armed"):
        left.unlink()
    whole_fleet.mend()
    return whole_fleet


GONE, BROKEN = "no decode worker is available", "the decode worker failed during the response"
KILLS = [
    # Before the prompt, in the middle of it, before its state is fetched, and while it is.
    *(("prefill", stage, "jax", None) for stage in ("", "prefill", "ask", "send")),
    ("prefill", "send", "tcp", None),
    # The other one fetches the state, if it is still there; else it computes the prompt.
    ("decode", "ask", "jax", None),
    ("decode", "pull", "jax", None),
    ("every decode", "ask", "jax", GONE),
    # What was sent cannot be taken back.
    ("decode", "decode", "jax", BROKEN),
    # Clients see a closed connection, and another router continues to work.
    *(("router", stage, "jax", "") for stage in ("prefill", "ask", "decode")),
]


@pytest.mark.parametrize(("victim", "stage", "transport", "error"), KILLS)
def test_a_kill(fleet, victim, stage, transport, error):
    """Which process is killed while a request is at a stage, and the error that its client gets; None: right tokens."""
    if victim == "prefill":
        fleet.restart(fleet.prefill[0], f"--transport={transport}")
        fleet.mend()
    before = sum(each.get("/split/status")["failed"] for each in fleet.decode)
    if stage:
        fleet.stages.arm(stage)
    else:
        fleet.prefill[0].kill()
    prompt = next(fleet.prompts)
    assert len(prompt) > 2 * 64  # more than one step
    asked = fleet.ask(prompt)
    if stage:
        assert fleet.stages.reached(stage), (stage, [each.log() for each in (*fleet.workers, fleet.front)])
        one, other = fleet.decoding_worker() if "decode" in victim else fleet.decode
        killed = {"prefill": fleet.prefill, "decode": [one], "every decode": [other, one], "router": [fleet.front]}
        for each in killed[victim]:
            each.kill()
        fleet.stages.go(stage)
    if error is None:
        alive = [each for each in fleet.decode if each.process.poll() is None]
        assert asked.result(90) == streamed(alive[0], prompt, LENGTH, salt="alone")
        status = [each.get("/split/status") for each in alive]
        if victim == "prefill":
            assert sum(each["failed"] for each in status) == before + (stage in ("ask", "send"))
        else:
            assert status[0]["arrived"] >= (stage == "ask")
    else:
        with pytest.raises(openai.APIError, match=error):
            asked.result(90)
    fleet.assert_at_rest(*(each for each in fleet.workers if each.process.poll() is None))
    if victim == "router":
        fleet.mend()
        prompt = next(fleet.prompts)
        assert fleet.ask(prompt).result(90) == streamed(fleet.decode[0], prompt, LENGTH, salt="alone")
