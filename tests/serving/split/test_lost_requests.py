"""A request that fails is not a worker that is down: what the router retries, what it blames, and what goes on."""

import asyncio
import errno
import json

import httpx
import pytest

from serving.api.http.errors import ApiError
from tests.support.servers import fake_workers
from tests.support.servers.fake_workers import BODY, Workers, all_of, ask, asked, pieces, relay, slow

STREAM = BODY | {"stream": True}
CUT = httpx.RemoteProtocolError("Server disconnected without sending a response.")


def exhausted() -> httpx.ConnectError:
    """What httpx raises where the process has no file descriptor left."""
    error = httpx.ConnectError("All connection attempts failed")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    return error


def test_a_lost_request_is_retried_and_the_worker_stays_up():
    workers = Workers(d1={"/v1/completions": CUT}, p1={"/split/prefill": CUT})
    over = relay(workers)
    for i in range(12):
        assert ask(over, BODY | {"prompt": f"text {i}"})[0] == 200
    assert over.stats.decode_retries >= 1
    assert over.stats.prefill_retries >= 1
    assert workers.paths("/split/prefill").count(("p2", "/split/prefill")) == 12, "another decode worker uses the state"
    assert all(worker.up for worker in (*over.fleet.prefill, *over.fleet.decode))


async def test_requests_lost_at_the_same_moment_end_no_other_request():
    """The health check that the first one starts is still under way when the last one is lost."""

    async def serve(request):
        if json.loads(request.content)["prompt"] == "cut":
            raise CUT
        await asyncio.sleep(0.3)
        return httpx.Response(200, content=pieces(b"{}"))

    over = relay(Workers(d1={"/ready": slow(0.1), "/v1/completions": serve}), prefill=(), decode=("d1",))
    others = [asyncio.create_task(over.answer(asked("completions", BODY))) for _ in range(6)]
    await asyncio.sleep(0.05)
    cut = [over.answer(asked("completions", BODY | {"prompt": "cut"})) for _ in range(16)]
    assert all(isinstance(each, ApiError) for each in await asyncio.gather(*cut, return_exceptions=True))
    assert [(await other).status for other in others] == [200] * 6
    assert over.fleet.decode[0].up


@pytest.mark.parametrize(
    ("ready", "up"),
    [(httpx.Response(200), True), (httpx.Response(503, json={}), False), (httpx.ConnectError("refused"), False)],
    ids=["ready", "not ready", "refused"],
)
async def test_the_health_check_after_a_lost_request_decides(ready, up):
    """New requests go elsewhere; a stream that flows is not cut, as while a worker drains."""
    last = asyncio.Event()

    async def endless():
        while not last.is_set():
            yield b"data: 1\n\n"
            await asyncio.sleep(0.01)
        yield b"data: [DONE]\n\n"

    async def serve(request):
        if json.loads(request.content)["prompt"] == "cut":
            raise CUT
        return httpx.Response(200, content=endless())

    over = relay(Workers(d1={"/ready": ready, "/v1/completions": serve}), prefill=(), decode=("d1",))
    answer = await over.answer(asked("completions", STREAM))
    read = asyncio.create_task(all_of(answer.body))
    for _ in range(20):
        with pytest.raises(ApiError, match="no decode worker is available"):
            await over.answer(asked("completions", STREAM | {"prompt": "cut"}))
    await asyncio.sleep(0.05)
    assert over.fleet.decode[0].up == up
    last.set()
    assert (await read)[-1] == b"data: [DONE]\n\n"


async def test_a_silent_stream_of_a_worker_that_is_down_ends():
    over = relay(Workers(), prefill=(), decode=("d1",))
    worker = over.fleet.decode[0]

    async def wait():
        async with worker.attended(60, streaming=True):
            await asyncio.sleep(60)

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0.05)
    worker.mark_down("no answer", stalled_after=30.0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    worker.mark_down("no answer", stalled_after=0.01)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(waiting, 30)


@pytest.mark.parametrize(
    ("error", "expected"), [(CUT, [True, True, False]), (exhausted(), [True] * 5)], ids=["connection", "descriptors"]
)
async def test_health_checks_without_an_answer_count_unless_the_router_is_at_fault(error, expected):
    over = relay(Workers(d1={"/ready": error}), decode=("d1",))
    for up in expected:
        await over.fleet._check_health(over.fleet.decode[0])
        assert over.fleet.decode[0].up == up


@pytest.mark.parametrize(
    ("error", "status"),
    [(httpx.LocalProtocolError("Illegal header value b'abc '"), 400), (exhausted(), 503)],
    ids=["header", "descriptors"],
)
@pytest.mark.parametrize("path", ["/split/prefill", "/split/expect", "/v1/completions"])
def test_an_error_raised_in_the_router_blames_no_worker(error, status, path):
    over = relay(Workers(**{name: {path: error} for name in ("p1", "p2", "d1", "d2")}))
    with pytest.raises(ApiError) as refused:
        ask(over)
    assert refused.value.status == status
    assert [(each.up, each.failures) for each in (*over.fleet.prefill, *over.fleet.decode)] == [(True, 0)] * 4


def test_a_worker_gets_no_more_requests_than_its_connections_allow():
    over = relay(Workers(), max_worker_requests=2)
    over.fleet.decode[0].load = 2
    for i in range(8):
        assert json.loads(ask(over, BODY | {"prompt": f"text {i}"})[1])["from"] == "d2"
    over.fleet.decode[1].load = 2
    with pytest.raises(ApiError, match="all decode workers are busy"):
        ask(over)


KEYS, TRACING = ("authorization", "x-api-key"), ("x-request-id", "traceparent", "tracestate")


@pytest.mark.parametrize("name", KEYS + TRACING)
@pytest.mark.parametrize(
    ("value", "forwarded"),
    [
        *((space + b"abc" + space, "abc") for space in (b" ", b"\t", b" \t ")),
        *((value, None) for value in (b"caf\xe9", b"\xff\xfe", b"a\x7fb", b"a\x01b")),
        (b"k" * 9000, ""),
    ],
)
async def test_headers_are_forwarded_trimmed_and_bounded(monkeypatch, name, value, forwarded):
    """Bytes that a client refuses to send are refused in keys, and left out elsewhere."""
    workers = Workers()
    async with fake_workers.front(monkeypatch, workers) as client:
        answer = await client.post("/v1/completions", json=BODY, headers=[(name.encode(), value)])
    expected = 431 if forwarded == "" else 400 if forwarded is None and name in KEYS else 200
    assert answer.status_code == expected
    assert [request.headers.get(name) for request in workers.requests] == ([forwarded] if expected == 200 else [])
