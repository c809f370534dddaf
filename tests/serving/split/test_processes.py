"""One prefill worker, one decode worker and a router, each a process, on loopback."""

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
