"""`kill -9` at every stage of a request, one by one: right tokens or one clear error, and nothing stays with survivors.

Workers stop where they are told to (`stoppable_worker.py`), so that each is killed exactly there.
"""

import threading

import openai
import pytest

from tests.support.processes import router, streamed, worker
from tests.support.stoppable_worker import Stages

pytestmark = pytest.mark.slow

LENGTH = 24
TEXT = "The prefill worker computes the prompt once and the decode worker goes on from its state. " * 2


class Fleet:
    """A prefill worker, two decode workers and a router, each of which is restarted where it was killed."""

    def __init__(self, folder) -> None:
        self.folder, self.stages = folder, Stages(folder)
        self.prefill = self.start("prefill")
        self.decode = [self.start("decode") for _ in range(2)]
        self.front = self.route()
        self.count = 0
        for each in self.all:
            each.wait_until_ready()

    def start(self, role, *more, port=None):
        options = ("--lease=4",) if role == "prefill" else ()
        return worker(role, self.folder, *options, *more, port=port, stages=self.folder)

    def route(self, port=None):
        return router([self.prefill], self.decode, self.folder, port=port)

    @property
    def all(self):
        return [self.prefill, *self.decode, self.front]

    def mend(self) -> None:
        """Start anew what does not run; then wait until the router knows."""
        if self.prefill.process.poll() is not None:
            self.prefill = self.start("prefill", port=self.prefill.port)
        for i, each in enumerate(self.decode):
            if each.process.poll() is not None:
                self.decode[i] = self.start("decode", port=each.port)
        if self.front.process.poll() is not None:
            self.front = self.route(port=self.front.port)
        for each in self.all:
            each.wait_until_ready()
        for _ in range(200):
            status = self.front.get("/status")
            if all(each["up"] for role in ("prefill", "decode") for each in status[role]):
                return
            threading.Event().wait(0.1)
        raise AssertionError(status)

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
        for each in survivors or self.all[:-1]:
            assert each.idle(), (each.url, each.get("/split/status"), each.log())


class PendingRequest:
    """A request under way in a thread of its own."""

    def __init__(self, fleet: Fleet, prompt: str) -> None:
        self.tokens: list[int] | None = None
        self.error: Exception | None = None

        def ask() -> None:
            try:
                self.tokens = streamed(fleet.front, prompt, LENGTH)
            except openai.APIError as error:
                self.error = error

        self._thread = threading.Thread(target=ask, daemon=True)
        self._thread.start()

    def ends(self) -> "PendingRequest":
        self._thread.join(90)
        assert not self._thread.is_alive()
        return self


@pytest.fixture(scope="module")
def whole_fleet(tmp_path_factory):
    fleet = Fleet(tmp_path_factory.mktemp("stages"))
    try:
        yield fleet
    finally:
        for each in reversed(fleet.all):
            each.close()


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
    asked = PendingRequest(fleet, prompt)
    assert fleet.stages.reached(stage), (stage, asked.error, [each.log() for each in fleet.all])
    return asked, prompt


def assert_right(fleet, asked, prompt, by=None):
    assert asked.ends().error is None, asked.error
    assert asked.tokens == streamed(by or fleet.decode[0], prompt, LENGTH, salt="alone")


def test_prefill_worker_before_the_prompt(fleet):
    fleet.prefill.kill()
    prompt = fleet.prompt()
    assert_right(fleet, PendingRequest(fleet, prompt), prompt)
    fleet.assert_idle(*fleet.decode)


def test_prefill_worker_in_the_middle_of_the_prompt(fleet):
    asked, prompt = stopped_at(fleet, "prefill")
    assert len(prompt) > 2 * 64  # more than one step
    fleet.prefill.kill()
    fleet.stages.go("prefill")
    assert_right(fleet, asked, prompt)
    fleet.assert_idle(*fleet.decode)


def test_prefill_worker_before_its_state_is_fetched(fleet):
    asked, prompt = stopped_at(fleet, "ask")
    fleet.prefill.kill()
    fleet.stages.go("ask")
    assert_right(fleet, asked, prompt)
    assert sum(each.get("/split/status")["failed"] for each in fleet.decode) >= 1
    fleet.assert_idle(*fleet.decode)


@pytest.mark.parametrize("transport", ["jax", "tcp"])
def test_prefill_worker_while_its_state_is_fetched(fleet, transport):
    fleet.prefill.close()
    fleet.prefill = fleet.start("prefill", f"--transport={transport}", port=fleet.prefill.port)
    fleet.mend()
    before = sum(each.get("/split/status")["failed"] for each in fleet.decode)
    asked, prompt = stopped_at(fleet, "send")
    fleet.prefill.kill()
    fleet.stages.go("send")
    assert_right(fleet, asked, prompt)
    assert sum(each.get("/split/status")["failed"] for each in fleet.decode) == before + 1
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
    fleet.assert_idle(fleet.prefill, other)


def test_the_only_decode_worker(fleet):
    """The client gets one error at once, and the prefill worker releases the state."""
    asked, _ = stopped_at(fleet, "ask")
    victim, other = fleet.decoding_worker()
    other.kill()
    victim.kill()
    fleet.stages.go("ask")
    assert isinstance(asked.ends().error, openai.InternalServerError)
    assert "no decode worker is available" in str(asked.error)
    fleet.assert_idle(fleet.prefill)


def test_decode_worker_after_the_first_token(fleet):
    """What was sent cannot be taken back: the stream ends with an error that says so."""
    asked, _ = stopped_at(fleet, "decode")
    victim, other = fleet.decoding_worker()
    victim.kill()
    fleet.stages.go("decode")
    assert "the decode worker failed during the response" in str(asked.ends().error)
    fleet.assert_idle(fleet.prefill, other)


@pytest.mark.parametrize("stage", ["prefill", "ask", "decode"])
def test_router(fleet, stage):
    """Clients see a closed connection, workers release unneeded states, and another router continues to work."""
    asked, _ = stopped_at(fleet, stage)
    fleet.front.kill()
    fleet.stages.go(stage)
    assert isinstance(asked.ends().error, openai.APIConnectionError | openai.APIError)
    fleet.assert_idle()
    fleet.mend()
    prompt = fleet.prompt()
    assert_right(fleet, PendingRequest(fleet, prompt), prompt)
