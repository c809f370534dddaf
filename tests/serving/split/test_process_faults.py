"""Faults of real processes on loopback: every request ends in time, with the right tokens or a clear error, and no
place stays taken."""

import signal
import threading

import httpx
import pytest

from tests.support.fleets.split_faults import TEXT, LoadedFleet, Outcomes

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with LoadedFleet(tmp_path_factory.mktemp("faults")) as fleet:
        yield fleet


def all_right(outcomes, count):
    assert outcomes == Outcomes(right=count)


FORMS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": f"0 {TEXT}"}], "max_tokens": 5},
    "/v1/responses": {"input": f"1 {TEXT}", "instructions": "Be brief.", "max_output_tokens": 5},
    "/v1/messages": {"messages": [{"role": "user", "content": f"2 {TEXT}"}], "system": "Be brief.", "max_tokens": 5},
}


def said(process, path, **more) -> list[str]:
    body = {"model": "demo", "temperature": 0} | FORMS[path] | more
    answer = httpx.post(process.url + path, json=body, timeout=120).json()
    if "choices" in answer:
        return [answer["choices"][0]["message"]["content"]]
    return [part["text"] for item in answer.get("output") or answer["content"] for part in item.get("content", [item])]


@pytest.mark.parametrize("path", FORMS)
def test_answers_of_every_form_are_those_of_one_server(fleet, path):
    """The prompt is computed elsewhere; completions are compared by every other test here."""
    arrived = fleet.fetched()["arrived"]
    assert said(fleet.front, path) == said(fleet.decode[0], path, cache_salt="alone") != []
    assert fleet.fetched()["arrived"] == arrived + 1
    fleet.assert_at_rest()


def test_a_frozen_prefill_worker(fleet):
    """SIGSTOP: its connections stand, and nothing comes. What waits for it goes to the other one."""
    frozen = fleet.prefill[0].process
    timer = threading.Timer(0.3, frozen.send_signal, (signal.SIGSTOP,))
    timer.start()
    try:
        all_right(fleet.ask(30, 10, seed=2), 30)
    finally:
        timer.join()
        frozen.send_signal(signal.SIGCONT)
    fleet.assert_at_rest()


@pytest.mark.parametrize("fault", ["hole", "drip", "flip"])
def test_states_that_do_not_come_as_they_should(fleet, fault):
    """Nothing, a byte a second, another byte: the decode worker computes the prompt itself."""
    before = fleet.fetched()["failed"]
    for number in range(2):
        fleet.stages.arm(fault)
        all_right(fleet.ask(4, 4, seed=number), 4)
        assert fleet.stages.reached(fault)
        fleet.stages.go(fault)
    assert fleet.fetched()["failed"] >= before + 2
    fleet.assert_at_rest()
