"""`kill -9` at every stage of a request, one by one: right tokens or one clear error, and nothing stays with survivors.

Workers stop where they are told to (`stoppable_worker.py`), so that each is killed exactly there.
"""

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
        self.count, self.pool = 0, ThreadPoolExecutor(8)

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

    def prompt(self) -> str:
        """A prompt that no worker has seen."""
        self.count += 1
        return f"{self.count} {TEXT}"

    def decoding_worker(self):
        """The decode worker that has a request; the other one."""
        busy = [each for each in self.front.get("/status")["decode"] if each["load"]]
        (found,) = [each for each in self.decode if each.url == busy[0]["url"]]
        return found, next(each for each in self.decode if each is not found)

    def assert_idle(self, *survivors) -> None:
        """Nothing is in use on those who live, and nothing kept: pools balance, leases have run out."""
        for each in survivors or self.workers:
            assert each.idle(), (each.url, each.get("/split/status"), each.log())


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory):
    with StoppableFleet(tmp_path_factory.mktemp("stages")) as fleet:
        yield fleet


@pytest.fixture
def fleet(whole_fleet):
    for left in whole_fleet.stages.folder.glob("*.armed"):
        left.unlink()
    whole_fleet.mend()
    return whole_fleet


def stopped_at(fleet, stage):
    """A request during which a worker stopped at a stage, and its prompt."""
    fleet.stages.arm(stage)
    prompt = fleet.prompt()
    asked = fleet.ask(prompt)
    assert fleet.stages.reached(stage), (stage, [each.log() for each in (*fleet.workers, fleet.front)])
    return asked, prompt


def assert_right(fleet, asked, prompt, by=None):
    assert asked.result(90) == streamed(by or fleet.decode[0], prompt, LENGTH, salt="alone")


@pytest.mark.parametrize(
    ("stage", "transport"), [("", "jax"), ("prefill", "jax"), ("ask", "jax"), ("send", "jax"), ("send", "tcp")]
)
def test_prefill_worker(fleet, stage, transport):
    """Before the prompt, in the middle of it, before its state is fetched, and while it is."""
    fleet.restart(fleet.prefill[0], f"--transport={transport}")
    fleet.mend()
    before = sum(each.get("/split/status")["failed"] for each in fleet.decode)
    if stage:
        asked, prompt = stopped_at(fleet, stage)
        assert len(prompt) > 2 * 64  # more than one step
        fleet.prefill[0].kill()
        fleet.stages.go(stage)
    else:
        fleet.prefill[0].kill()
        prompt = fleet.prompt()
        asked = fleet.ask(prompt)
    assert_right(fleet, asked, prompt)
    failed = sum(each.get("/split/status")["failed"] for each in fleet.decode)
    assert failed == before + (stage in ("ask", "send"))
    fleet.assert_idle(*fleet.decode)


@pytest.mark.parametrize("stage", ["ask", "pull"])
def test_decode_worker_before_it_fetches_and_while_it_does(fleet, stage):
    """The other one fetches the state, if it is still there; else it computes the prompt."""
    asked, prompt = stopped_at(fleet, stage)
    victim, other = fleet.decoding_worker()
    victim.kill()
    fleet.stages.go(stage)
    assert_right(fleet, asked, prompt, by=other)
    arrived = other.get("/split/status")["arrived"]
    assert arrived >= (stage == "ask")
    fleet.assert_idle(fleet.prefill[0], other)


def test_the_only_decode_worker(fleet):
    """The client gets one error at once, and the prefill worker releases the state."""
    asked, _ = stopped_at(fleet, "ask")
    victim, other = fleet.decoding_worker()
    other.kill()
    victim.kill()
    fleet.stages.go("ask")
    with pytest.raises(openai.InternalServerError, match="no decode worker is available"):
        asked.result(90)
    fleet.assert_idle(fleet.prefill[0])


def test_decode_worker_after_the_first_token(fleet):
    """What was sent cannot be taken back: the stream ends with an error that says so."""
    asked, _ = stopped_at(fleet, "decode")
    victim, other = fleet.decoding_worker()
    victim.kill()
    fleet.stages.go("decode")
    with pytest.raises(openai.APIError, match="the decode worker failed during the response"):
        asked.result(90)
    fleet.assert_idle(fleet.prefill[0], other)


@pytest.mark.parametrize("stage", ["prefill", "ask", "decode"])
def test_router(fleet, stage):
    """Clients see a closed connection, workers release unneeded states, and another router continues to work."""
    asked, _ = stopped_at(fleet, stage)
    fleet.front.kill()
    fleet.stages.go(stage)
    with pytest.raises(openai.APIError):
        asked.result(90)
    fleet.assert_idle()
    fleet.mend()
    prompt = fleet.prompt()
    assert_right(fleet, fleet.ask(prompt), prompt)
