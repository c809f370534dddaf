"""The router, over workers that are made up."""

import asyncio
import json

import httpx
import pytest

from serving.api.http.errors import ApiError
from serving.disagg.router.relay import Relay, prompt_text, splittable
from serving.disagg.router.workers import Fleet, Remote, choose
from serving.disagg.settings import RouterSettings
from serving.disagg.wire import Ticket

TICKET = Ticket(id="t", worker="http://p1", handoff="full", prompt_token_ids=[1, 2], position=2, lease=9.0)
BODY = {"model": "m", "prompt": "some text", "max_tokens": 4}


async def pieces(*given):
    for piece in given:
        yield piece


class Workers:
    """Answers for all of them, and what they were asked."""

    def __init__(self, **broken):
        self.broken, self.asked = broken, []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        host, path = request.url.host, request.url.path
        self.asked.append((host, path))
        answer = self.broken.get(host)
        if isinstance(answer, Exception):
            raise answer
        if isinstance(answer, dict) and path in answer:
            found = answer[path]
            if isinstance(found, Exception):
                raise found
            return found
        if path == "/split/prefill":
            return httpx.Response(200, json=TICKET.model_copy(update={"worker": f"http://{host}"}).model_dump())
        if path.startswith("/v1/"):
            if json.loads(request.content).get("stream"):
                return httpx.Response(200, content=pieces(b"data: 1\n\n", b"data: [DONE]\n\n"))
            return httpx.Response(200, content=pieces(json.dumps({"from": host}).encode()))
        return httpx.Response(200, json={"accepted": True})

    def paths(self, start):
        return [(host, path) for host, path in self.asked if path.startswith(start)]


def relay(workers, prefill=("p1", "p2"), decode=("d1", "d2"), **settings):
    client = httpx.AsyncClient(transport=httpx.MockTransport(workers))
    fleet = Fleet.of([f"http://{name}" for name in prefill], [f"http://{name}" for name in decode], client)
    return Relay(fleet, RouterSettings.create(decode=("http://d1",), **settings))


def ask(over, body=BODY):
    async def run():
        answer = await over.answer("completions", body, {})
        return answer.status, b"".join([piece async for piece in answer.body])

    return asyncio.run(run())


def test_a_request_goes_by_way_of_both():
    workers = Workers()
    over = relay(workers)
    status, content = ask(over)
    assert status == 200
    assert [path for _, path in workers.asked] == ["/split/prefill", "/split/expect", "/v1/completions"]
    assert json.loads(content)["from"] == workers.asked[1][0]
    assert (over.stats.split, over.stats.alone) == (1, 0)
    assert all(worker.load == 0 for worker in (*over.fleet.prefill, *over.fleet.decode))


def test_the_routers_own_key_is_not_lent_to_clients():
    seen = []

    class Noting(Workers):
        async def __call__(self, request):
            seen.append((request.url.path, request.headers.get("authorization")))
            return await super().__call__(request)

    workers = Noting(d1={"/split/expect": httpx.Response(409, json={})})
    over = relay(workers, decode=("d1",))
    over.fleet.headers = {"Authorization": "Bearer router"}
    ask(over)
    assert {path: key for path, key in seen if key} == {"/split/release": "Bearer router"}


def test_streams_pass_through():
    assert ask(relay(Workers()), BODY | {"stream": True})[1] == b"data: 1\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("trouble", [httpx.ConnectError("no"), {"/split/prefill": httpx.Response(503)}])
def test_another_prefill_worker_is_asked(trouble):
    workers = Workers(p1=trouble)
    over = relay(workers)
    for i in range(8):
        ask(over, BODY | {"prompt": f"text {i}"})
    assert over.stats.split == 8
    assert over.stats.prefill_retries >= 1


def test_without_a_prefill_worker_the_other_one_does_it_all():
    workers = Workers(p1=httpx.ConnectError("no"), p2=httpx.ReadError("gone"))
    over = relay(workers)
    assert ask(over)[0] == 200
    assert (over.stats.split, over.stats.alone) == (0, 1)
    with pytest.raises(ApiError, match="no prefill worker"):
        ask(relay(workers, on_failure="fail"))


def test_of_a_wrong_request_the_decode_worker_says_what_is_wrong():
    refused = httpx.Response(400, json={"error": {"message": "too long"}})
    workers = Workers(p1={"/split/prefill": refused}, p2={"/split/prefill": refused})
    ask(relay(workers))
    assert [path for _, path in workers.asked] == ["/split/prefill", "/v1/completions"]


def test_another_decode_worker_takes_over_with_the_same_state():
    workers = Workers(d1={"/v1/completions": httpx.ReadError("died")})
    over = relay(workers, decode=("d1", "d2"))
    for i in range(8):
        assert ask(over, BODY | {"prompt": f"text {i}"})[0] == 200
        over.fleet.decode[0].up = True
    assert over.stats.decode_retries >= 1
    assert len(workers.paths("/split/prefill")) == 8
    with pytest.raises(ApiError, match="no decode worker"):
        ask(relay(Workers(d1=httpx.ConnectError("no")), decode=("d1",)))


def test_a_state_that_cannot_be_used_is_let_go():
    workers = Workers(d1={"/split/expect": httpx.Response(409, json={"error": {"message": "model differs"}})})
    assert ask(relay(workers, decode=("d1",)))[0] == 200
    assert [path for _, path in workers.paths("/split")] == ["/split/prefill", "/split/expect", "/split/release"]


def test_what_cannot_be_split_is_not():
    assert splittable("completions", BODY)
    assert splittable("completions", {"prompt": [1, 2]})
    assert splittable("chat/completions", {"messages": []})
    for body in ({"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, BODY | {"prompt_logprobs": 1},
                 BODY | {"echo": True, "logprobs": 1}):  # fmt: skip
        assert not splittable("completions", body)
    workers = Workers()
    ask(relay(workers), BODY | {"prompt_logprobs": 0})
    ask(relay(workers, split_above=100))
    assert not workers.paths("/split")


def test_workers_are_chosen_by_the_prompts_beginning():
    fleet = [Remote(f"http://{i}", "decode") for i in range(5)]
    keys = [f"prompt {i}".encode() for i in range(200)]

    def chosen(workers):
        return {key: choose(workers, key, slack=0).url for key in keys}

    first = chosen(fleet)
    assert min(list(first.values()).count(worker.url) for worker in fleet) > 20
    fewer = chosen(fleet[:-1])
    moved = [key for key in keys if fewer[key] != first[key]]
    assert all(first[key] == fleet[-1].url for key in moved), "only the keys of the worker that went"
    busy = next(worker for worker in fleet if worker.url == first[keys[0]])
    busy.load = 5
    assert choose(fleet, keys[0], slack=4).url != busy.url
    assert choose(fleet, keys[0], slack=5).url == busy.url
    busy.up = False
    assert choose(fleet, keys[0], slack=9) is not busy
    assert choose([], b"", slack=0) is None


def test_a_conversation_keeps_its_beginning():
    turns = [{"role": "user", "content": "hello"}]
    before = prompt_text("chat/completions", {"messages": turns})
    turns += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    assert prompt_text("chat/completions", {"messages": turns}).startswith(before[:-1])


def test_workers_come_and_go():
    fleet = relay(Workers()).fleet
    kept = fleet.prefill[1]
    fleet.follow(prefill=["http://p2/", "http://p3"], decode=[])
    assert [worker.url for worker in fleet.prefill] == ["http://p2", "http://p3"]
    assert fleet.prefill[0] is kept
    assert not fleet.decode
