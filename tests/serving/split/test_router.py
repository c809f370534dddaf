"""The router, over workers that are made up."""

import asyncio
import json
import time
from types import SimpleNamespace

import httpx
import pytest

from serving.api.http.context import Context
from serving.api.http.errors import ApiError
from serving.api.http.settings import ServerSettings
from serving.split.http.peer import SealAuth
from serving.split.router.app import create_router
from serving.split.router.workers import Remote, choose
from serving.split.seal import HEADER, RECEIVER, Seal, SealChecker
from serving.split.settings import RouterSettings
from tests.serving.split.test_manifest import BASE, other
from tests.support.servers import fake_workers
from tests.support.servers.fake_workers import BODY, Workers, all_of, ask, asked, relay, slow, then_silent

WRONG = {"/split/prefill": httpx.Response(400, json={"error": {"message": "too long"}})}
MISMATCH = {"/split/expect": httpx.Response(409, json={"error": {"message": "model differs"}})}
GONE = {"p1": httpx.ConnectError("no"), "p2": httpx.ReadError("gone")}
BOTH, ALONE = ["/split/prefill", "/split/expect", "/v1/completions"], ["/v1/completions"]


@pytest.mark.parametrize(
    ("broken", "body", "settings", "paths"),
    [
        ({}, {}, {}, BOTH),
        ({}, {"stream": True}, {}, BOTH),
        # Of a wrong request, the decode worker says what is wrong.
        ({"p1": WRONG, "p2": WRONG}, {}, {}, ["/split/prefill", *ALONE]),
        # A state that cannot be used is released.
        ({"d1": MISMATCH, "d2": MISMATCH}, {}, {}, [*BOTH[:2], "/split/release", *ALONE]),
        # Without a prefill worker, the decode worker does it all.
        (GONE, {}, {}, ["/split/prefill", "/split/prefill", *ALONE]),
        # These are not split.
        ({}, {"prompt_logprobs": 0}, {}, ALONE),
        ({}, {}, {"split_above": 100}, ALONE),
    ],
)
def test_where_a_request_goes(broken, body, settings, paths):
    workers = Workers(**broken)
    over = relay(workers, **settings)
    status, content = ask(over, BODY | body)
    assert status == 200
    assert [path for _, path in workers.asked if path != "/ready"] == paths
    assert content == b"data: 1\n\ndata: [DONE]\n\n" or json.loads(content)["from"] == workers.paths("/v1/")[-1][0]
    assert (over.stats.split, over.stats.alone) == ((1, 0) if paths == BOTH else (0, 1))
    assert all(worker.load == 0 for worker in (*over.fleet.prefill, *over.fleet.decode))


async def test_what_a_router_has_loaded_is_not_collected_during_requests(monkeypatch):
    frozen = []
    monkeypatch.setattr("gc.freeze", lambda: frozen.append(True))
    app = create_router(RouterSettings.create(decode=("http://127.0.0.1:1",)))
    async with app.router.lifespan_context(app):
        assert frozen


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
    before = asked("chat/completions", {"messages": turns}).text
    turns += [{"role": "assistant", "content": "hi"}, {"role": "user", "content": "and?"}]
    assert asked("chat/completions", {"messages": turns}).text.startswith(before[:-1])
    assert asked("responses", {"input": "x"}).text == "x"
    one, other = ({"instructions": "i", "input": [{"content": text}]} for text in ("a", "b"))
    assert asked("responses", one).text != asked("responses", other).text
    assert asked("messages", {"system": "s", "messages": []}).text.startswith('["s"')


def test_workers_come_and_go():
    fleet = relay(Workers()).fleet
    kept = fleet.prefill[1]
    fleet.follow(prefill=["http://p2/", "http://p3"], decode=[])
    assert [worker.url for worker in fleet.prefill] == ["http://p2", "http://p3"]
    assert fleet.prefill[0] is kept
    assert not fleet.decode


def test_pairs_that_cannot_exchange_states_are_told_once(caplog):
    over, strict = (relay(Workers(), prefill=("p1",), on_failure=policy) for policy in ("recompute", "fail"))
    for each in (over, strict):
        each.fleet.prefill[0].manifest = BASE
        for worker in each.fleet.decode:
            worker.manifest = other(model="another")
        each.fleet._compare()
        each.fleet._compare()
        pairs = each.fleet.status()["mismatched"]
        assert [pair["decode"] for pair in pairs if "model differs" in pair["why"]] == ["http://d1", "http://d2"]
    assert sum("model differs" in record.getMessage() for record in caplog.records) == 4
    assert ask(over)[0] == 200
    assert (over.stats.split, over.stats.alone) == (0, 1)
    with pytest.raises(ApiError, match="no prefill worker is available"):
        ask(strict)


async def test_what_waits_for_a_worker_that_goes_down_goes_to_another():
    """As a stopped process: the connection stands, and nothing comes."""
    over = relay(Workers(p1={"/split/prefill": slow(60)}, d1={"/v1/completions": slow(60)}))
    asks = [over.answer(asked("completions", BODY | {"prompt": f"text {i}"})) for i in range(12)]
    tasks = [asyncio.create_task(ask) for ask in asks]
    await asyncio.sleep(0.1)
    assert not all(task.done() for task in tasks)
    for worker in (over.fleet.prefill[0], over.fleet.decode[0]):
        worker.mark_down("three health checks missed")
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 5)
    assert [answer.status for answer in answers] == [200] * 12
    for answer in answers:
        await answer.body.aclose()
    assert all(worker.load == 0 for worker in (*over.fleet.prefill, *over.fleet.decode))
    assert over.stats.split == 12


def test_a_request_has_one_deadline():
    for late in BOTH:
        names = ("p1", "p2") if late == "/split/prefill" else ("d1", "d2")
        workers = Workers(**{name: {late: slow(60)} for name in names})
        over = relay(workers, first_token_timeout=0.3, request_timeout=0.3)
        begin = time.monotonic()
        with pytest.raises(ApiError, match="no answer before the deadline") as error:
            ask(over)
        assert error.value.status == 503
        assert time.monotonic() - begin < 30
        assert all(worker.up for worker in (*over.fleet.prefill, *over.fleet.decode)), "slow is not down"
        assert over.stats.late == 1


async def stalls(request):
    """A stream of one message."""
    return httpx.Response(200, content=then_silent(b"data: 1\n\n"))


def test_a_stream_that_stalls_ends():
    over = relay(Workers(d1={"/v1/completions": stalls}), decode=("d1",), stall_timeout=0.2)
    with pytest.raises(ApiError, match="during the response"):
        ask(over, BODY | {"stream": True})
    assert over.fleet.decode[0].load == 0


async def test_a_router_that_stops_tells_everybody():
    over = relay(Workers(d1={"/v1/completions": stalls}, d2={"/v1/completions": slow(60)}))
    bodies = [BODY | {"stream": True, "prompt": f"text {i}"} for i in range(12)]
    tasks = [asyncio.create_task(over.answer(asked("completions", body))) for body in bodies]
    await asyncio.sleep(0.2)
    begun = [task.result() for task in tasks if task.done()]
    assert 0 < len(begun) < 12
    reads = [asyncio.create_task(all_of(answer.body)) for answer in begun]
    await asyncio.sleep(0.05)
    await asyncio.to_thread(over.leave)
    found = await asyncio.wait_for(asyncio.gather(*tasks, *reads, return_exceptions=True), 5)
    errors = [each for each in found if isinstance(each, ApiError)]
    assert len(errors) == 12
    assert {(error.status, error.code) for error in errors} == {(503, "engine_stopped")}


@pytest.mark.parametrize("status", [503, 429])
def test_busy_is_not_down(status):
    busy = httpx.Response(status, json={"error": {"message": "full"}})
    over = relay(Workers(p1={"/split/prefill": busy}, d1={"/v1/completions": busy}))
    for i in range(8):
        assert ask(over, BODY | {"prompt": f"text {i}"})[0] == 200
    assert all(worker.up for worker in (*over.fleet.prefill, *over.fleet.decode))
    assert over.stats.split == 8
    everyone = Workers(**{name: {"/v1/completions": busy} for name in ("d1", "d2")})
    with pytest.raises(ApiError, match="all decode workers are busy") as error:
        ask(relay(everyone))
    assert error.value.status == 503
    # The router releases a state that no worker will fetch.
    assert ("p1", "/split/release") in everyone.asked or ("p2", "/split/release") in everyone.asked


def test_messages_to_workers_are_sealed_and_clients_get_neither_seal_nor_the_routers_key():
    seal, seen = Seal("0123456789abcdef"), {}
    checker = SealChecker(seal)

    class Noting(Workers):
        async def __call__(self, request):
            path = request.url.path
            seen[path] = checker.holds(request.headers.get(HEADER, ""), path, request.content)
            if path.startswith("/split/") and not seen[path]:
                return httpx.Response(401, headers={RECEIVER: checker.name})
            return await super().__call__(request)

    workers = Noting(d1={"/split/expect": httpx.Response(409, json={})})
    over = relay(workers, decode=("d1",))
    over.fleet.auth, over.fleet.headers = SealAuth(seal), {"Authorization": "Bearer router"}
    ask(over)
    keys = {request.url.path: request.headers.get("authorization") for request in workers.requests}
    assert {path: key for path, key in keys.items() if key} == {"/split/release": "Bearer router"}
    assert seen == {"/split/prefill": True, "/split/expect": True, "/split/release": True, "/v1/completions": False}


@pytest.fixture
def front(monkeypatch):
    """A router over made-up workers, and what they were asked."""
    workers = Workers()
    return workers, fake_workers.front(monkeypatch, workers, prefill=("http://p1",), max_body_bytes=100_000)


def completion(field: bytes) -> tuple[str, str, bytes, int]:
    return "POST", "/v1/completions", b'{"model": "m", "prompt": ' + field + b"}", 400


@pytest.mark.parametrize(
    ("method", "path", "content", "status"),
    [
        ("POST", "/v1/responses", b'{"input": "x", "previous_response_id": "resp_1"}', 400),
        ("POST", "/v1/responses", b'{"input": [{"type": "item_reference"}]}', 400),
        ("POST", "/v1/messages", b'{"messages": [], "max_tokens": 5}', 400),
        ("GET", "/v1/responses/resp_1", b"", 404),
        ("DELETE", "/v1/responses/resp_1", b"", 404),
        ("POST", "/v1/embeddings", b'{"input": "x"}', 404),
        ("POST", "/v1/completions", b"{", 400), ("POST", "/v1/completions", b"[]", 400),
        completion(b'"x", "temperature": NaN'), completion(b'"x", "top_p": 1e999'), completion(b'"\\ud800"'),
        completion(b'"x", "top_k": 4294967296'), completion(b"[" * 40_000 + b"]" * 40_000), completion(b"5"),
        (*completion(b'"' + b"x" * 200_000 + b'"')[:3], 413),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_the_router_refuses_a_bad_request_itself_and_blames_no_worker(front, method, path, content, status):
    workers, client = front
    async with client:
        headers = {"content-type": "application/json"}
        answer = await client.request(method, path, content=content, headers=headers)
        assert answer.status_code == status, answer.text
        assert answer.json()["error"]["message"]
        known = (await client.get("/status")).json()
        assert all(worker["up"] and not worker["failures"] for worker in known["prefill"] + known["decode"])
    assert not workers.paths("/")


async def test_what_a_server_has_a_router_has(front):
    workers, client = front
    async with client:
        headers = {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}
        answer = await client.post("/v1/completions", json=BODY | {"vllm_xargs": {}}, headers=headers)
        assert answer.status_code == 200
        assert answer.headers["x-request-id"]
        assert (await client.post("/tokenize", json={"prompt": "x"})).status_code == 200
        assert (await client.post("/v1/completions", content=b"x")).status_code == 415
        text = (await client.get("/metrics")).text
        assert "mamba_jax_router_split_total 1.0" in text
        assert 'mamba_jax_worker_up{role="decode",url="http://d1"} 1.0' in text
        assert 'mamba_jax_http_requests_total{path="/v1/completions",status="200"} 1.0' in text
    assert ("d1", "/tokenize") in workers.asked


async def test_a_dripping_worker_does_not_hold_up_the_looks_at_others():
    none = {"/split/manifest": httpx.Response(404)}
    over = relay(Workers(p1={"/ready": slow(60)}, p2=none, d1=none, d2=none), check_interval=0.01, check_timeout=0.05)
    watching = asyncio.create_task(over.fleet.watch())
    await asyncio.sleep(0.6)
    watching.cancel()
    assert [worker.up for worker in (*over.fleet.prefill, *over.fleet.decode)] == [False, True, True, True]


def test_a_step_that_does_not_end_shows_in_health():
    engine = SimpleNamespace(running=True, step_seconds=200.0)
    context = Context(engine, ServerSettings.create(step_timeout=150.0), None, None, None)
    context.check_alive()  # it may still compile
    context.ready = True
    with pytest.raises(ApiError, match="in one step for 200 s") as error:
        context.check(None)
    assert error.value.status == 503
    engine.step_seconds = 100.0
    context.check(None)
