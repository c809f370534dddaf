"""Faults of real processes on loopback: every request ends in time, with the right tokens or a clear error, and no
place stays taken."""

import signal
import threading
import time

import httpx
import pytest

from serving.split.seal import Seal
from tests.support.fleets.split_faults import PROMPTS, TEXT, LoadedFleet, Outcomes, sealed_status
from tests.support.servers.listener import listener
from tests.support.waiting import comes_true, is_ready

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


def test_black_holes_and_drips_instead_of_workers(fleet):
    """Ports that take a connection and say nothing, or a byte a second, are in the router's list."""

    def silent(connection):
        time.sleep(30)

    def drips(connection):
        for byte in b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n" * 10:
            connection.sendall(bytes([byte]))
            time.sleep(1.0)

    with listener(silent) as hole, listener(drips) as drip:
        more = [f"--prefill=http://127.0.0.1:{port}" for port in (hole, drip)]
        more += [f"--decode=http://127.0.0.1:{hole}"]
        front = fleet.route(*more)
        try:
            # As soon as it listens: it takes all for granted.
            comes_true(lambda: httpx.get(f"{front.url}/ping"), every=0.02)
            all_right(fleet.ask(24, 12, front=front, seed=5), 24)
            up = {each["url"]: each["up"] for each in front.get("/status")["prefill"]}
            assert list(up.values()) == [True, True, False, False]
        finally:
            front.close()
    fleet.assert_at_rest()


def test_a_lease_that_has_run_out(fleet):
    """The decode worker asks for the state when it is gone."""
    before = _without_it(fleet)
    expired = sum(each["expired"] for each in map(sealed_status, fleet.prefill))
    fleet.stages.arm("ask")
    frozen = fleet.decode[0].process

    def hold():
        assert fleet.stages.reached("ask")
        frozen.send_signal(signal.SIGSTOP)  # or it would renew the lease
        comes_true(lambda: sum(each["expired"] for each in map(sealed_status, fleet.prefill)) > expired, 30)
        fleet.stages.go("ask")
        frozen.send_signal(signal.SIGCONT)

    thread = threading.Thread(target=hold)
    thread.start()
    try:
        outcomes = fleet.ask(1, 1, seed=7)
    finally:
        thread.join()
    # While it is frozen the only decode worker looks down: the client is told so, or is answered right.
    assert not outcomes.wrong
    assert not outcomes.late
    assert outcomes.right + len(outcomes.errors) == 1
    assert sum(each["expired"] for each in map(sealed_status, fleet.prefill)) > expired
    fleet.assert_at_rest()
    assert _without_it(fleet) > before


def _without_it(fleet) -> int:
    """States that the decode worker has done without, or has stopped waiting for."""
    counts = fleet.fetched()
    return counts["failed"] + counts["late"] + counts["spared"]


def test_messages_without_the_fleets_seal(fleet):
    """Workers refuse routers with another secret, and do not connect to workers that unsigned tickets name."""
    before = [each["begun"] for each in map(sealed_status, fleet.prefill)]
    front = fleet.route(secret="another fleet's secret")
    try:
        comes_true(lambda: is_ready(front.url))
        all_right(fleet.ask(6, 3, front=front, seed=9), 6)
    finally:
        front.close()
    assert [each["begun"] for each in map(sealed_status, fleet.prefill)] == before
    heard = []

    def unknown_worker(connection):
        heard.append(connection.recv(10))

    with listener(unknown_worker) as port:
        ticket = {"id": "x", "worker": f"http://127.0.0.1:{port}", "handoff": "full", "prompt_token_ids": [1, 2]}
        for headers in ({}, Seal("another fleet's secret").headers("/split/expect", b"", "")):
            answer = httpx.post(f"{fleet.decode[0].url}/split/expect", json=ticket | {"position": 2}, headers=headers)
            assert answer.status_code == 401
    assert not heard
    all_right(fleet.ask(len(PROMPTS), 4, seed=10), len(PROMPTS))
    fleet.assert_at_rest()
