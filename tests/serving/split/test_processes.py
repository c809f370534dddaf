"""One prefill worker, one decode worker and a router, each a process, on loopback."""

import re

import httpx
import pytest

from tests.support.fleets.processes import client, router, running, streamed, worker

pytestmark = pytest.mark.full

TEXT = "The prefill worker computes the prompt once and the decode worker goes on from its state. " * 3


ALONE = {"cache_salt": "alone"}
"""Without what has arrived."""


def post(process, path, body):
    answer = httpx.post(process.url + path, json={"model": "demo", "temperature": 0} | body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def texts_of(answer):
    """Of either form."""
    items = answer.get("output") or answer["content"]
    return [part["text"] for item in items for part in item.get("content", [item])]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    prefill, decode = worker("prefill", folder), worker("decode", folder)
    with running(prefill, decode, router([prefill], [decode], folder)) as fleet:
        yield fleet


def test_streams_equal_those_of_one_server(fleet):
    """What the router streams is what the decode worker says by itself, and the prompt was computed elsewhere."""
    prefill, decode, front = fleet
    before = decode.get("/split/status")["arrived"]
    texts = [TEXT, "a", "To be or not to be", f"0 {TEXT}", f"1 {TEXT}"]
    for text in texts:
        tokens = streamed(front, text, 24)
        assert len(tokens) == 24
        # By itself: without what has arrived.
        assert streamed(decode, text, 24, salt="alone") == tokens
    after = decode.get("/split/status")
    assert after["arrived"] == before + len(texts)
    assert after["failed"] == 0
    answer = client(front).chat.completions.create(
        model="demo", messages=[{"role": "user", "content": "Say something."}], max_tokens=5, temperature=0
    )
    assert answer.usage.completion_tokens >= 1
    one, other = ([{"role": "user", "content": f"Say {what} of {TEXT}"}] for what in ("something", "nothing"))
    forms = {
        "/v1/responses": {"input": one, "instructions": "Be brief.", "max_output_tokens": 5},
        "/v1/messages": {"messages": other, "system": "Be brief.", "max_tokens": 5},
    }
    for path, body in forms.items():
        arrived = decode.get("/split/status")["arrived"]
        said = [texts_of(post(each, path, body | extra)) for each, extra in ((front, {}), (decode, ALONE))]
        assert said[0] == said[1] != []
        assert decode.get("/split/status")["arrived"] == arrived + 1
    assert prefill.idle(), prefill.get("/split/status")
    assert decode.idle()


@pytest.mark.slow
def test_a_form_behind_the_split(fleet):
    """The decode worker applies the mask, on all paths of the prompt."""
    *sides, front = fleet
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
        form = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}, "max_tokens": 20}
        body = {"prompt": "word " * 60} | form | fields
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", post(front, "/v1/completions", body)["choices"][0]["text"])
    wrong = {"model": "demo"} | body | {"structured_outputs": {"regex": "("}}
    assert httpx.post(f"{front.url}/v1/completions", json=wrong, timeout=60).status_code == 400
    assert all(each.idle() for each in sides)


def test_a_killed_prefill_worker_costs_time_only(fleet):
    """kill -9 between two tokens, and before the next request: both end in the right tokens."""
    prefill, decode, front = fleet
    text = f"killed {TEXT}"
    first = streamed(front, text, 48, on_first=prefill.kill)
    assert len(first) == 48
    again = streamed(front, f"dead {TEXT}", 16)
    assert again == streamed(decode, f"dead {TEXT}", 16, salt="alone")
    assert first == streamed(decode, text, 48, salt="alone")
    assert decode.idle()
    assert not front.get("/status")["prefill"][0]["up"]
