"""Bounds on one connection, and on all of them together, over sockets, plain and with TLS."""

import contextlib
import functools
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI, Request

from serving.api.http.connection import server as connections
from serving.api.http.connection.server import raise_descriptor_limit, reserve
from serving.api.http.settings import ConnectionBounds
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings
from tests.support.servers.fake_workers import BODY, asked
from tests.support.servers.hostile_requests import raw
from tests.support.servers.live_server import running
from tests.support.waiting import comes_true, line_of


def small_server(keys=None, **bounds):
    """A small server, and its URL."""
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, int]:
        return {"port": request.url.port or 0}

    return running(app, ConnectionBounds(**bounds), **(keys or {}))


def connect(url):
    address = urlsplit(url)
    return socket.create_connection((address.hostname, address.port), timeout=30)


@contextlib.contextmanager
def silent(url, count):
    """So many connections that have been accepted and send nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(connect(url)).sendall(b"GET")
        yield


def closed(wire, seconds):
    wire.settimeout(seconds)
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("size", [10, 300_000])
def test_requests_beyond_the_limit_of_connections_get_503(size):
    """The client gets the answer however large its body is, and requests are served again once there is room."""
    with small_server(max_connections=3) as (_, url):
        for _ in range(2):
            assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
            with silent(url, 3):
                for path in ("/v1/completions", "/v1/messages"):
                    answer = httpx.post(url + path, json={"prompt": "x" * size}, timeout=30)
                    assert answer.status_code == 503
                    assert answer.headers["retry-after"] == "1"
                    assert answer.headers["connection"] == "close"
                    assert answer.json()["error"]["code"] == "too_many_connections"
                    assert ("type" in answer.json()) == (path == "/v1/messages")


def test_refused_connections_are_bounded_in_number_and_time(monkeypatch):
    monkeypatch.setattr(connections, "_REFUSAL_TIMEOUT", 0.5)
    most = 3 + connections.reserve(3)
    with small_server(max_connections=3, header_timeout=60) as (_, url), contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(url)) for _ in range(most + 5)]
        assert all(closed(wire, 30) for wire in wires[3:])
        assert not any(closed(wire, 0.1) for wire in wires[:3])


async def test_a_router_retries_elsewhere_what_a_full_worker_refuses():
    with small_server(max_connections=3) as (_, full), small_server(max_connections=3) as (_, other), silent(full, 3):
        async with httpx.AsyncClient() as client:
            fleet = Fleet(RouterSettings.create(decode=(full, other)), client)
            relay, served = Relay(fleet), []
            for i in range(8):
                answer = await relay.answer(asked("completions", BODY | {"prompt": f"text {i}"}))
                served.append((answer.status, b"".join([piece async for piece in answer.body])))
            for _ in range(4):
                for worker in fleet.decode:
                    await fleet._check_health(worker, with_manifest=False)
    assert served == [(200, b'{"port":%d}' % int(other.rpartition(":")[2]))] * 8
    assert [(worker.up, worker.failures, worker.missed) for worker in fleet.decode] == [(True, 0, 0)] * 2


HEAD = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"


@pytest.mark.parametrize(
    "head",
    [HEAD + b"x: %s\r\n\r\n", HEAD + b"x: y\r\n" * 20_000 + b"\r\n", HEAD.replace(b"health", b"health?%s") + b"\r\n"],
    ids=["one header", "many headers", "the path"],
)  # fmt: skip
def test_a_head_that_comes_complete_in_one_piece_is_bounded(server, head):
    assert raw(head.replace(b"%s", b"y" * server.context.settings.max_header_bytes))(server.url) == {0}


def test_trailers_without_end_are_bounded(server):
    head = HEAD.replace(b"GET /health", b"POST /tokenize") + b"content-type: application/json\r\n"
    text = head + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"
    for trailers in (b"x: y\r\n" * 200_000, b"x: " + b"y" * 1_000_000):
        assert raw(text + trailers, seconds=10)(server.url) == {0}


def test_a_request_in_the_same_piece_as_a_refused_one_is_ignored(server):
    labels = {"path": "/ping", "status": "200"}
    registry = server.context.metrics.registry
    asked = functools.partial(registry.get_sample_value, "mamba_jax_http_requests_total", labels)
    server.http.get("/ping")
    before, ping = asked(), b"GET /ping HTTP/1.1\r\nhost: x\r\n"
    assert raw(ping + b"x: " + b"y" * 70_000 + b"\r\n\r\n" + ping + b"\r\n")(server.url) == {0}
    assert server.http.get("/ping").status_code == 200
    assert asked() == before + 1


def test_a_body_in_the_same_piece_does_not_count_as_head(server):
    body = b'{"prompt": "' + b"x" * (2 * server.context.settings.max_header_bytes) + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    assert raw(head + b"content-length: %d\r\n\r\n" % len(body) + body)(server.url) != {0}


HANGS = """
import contextlib, socket, sys, threading, types
from fastapi import FastAPI
sys.modules["serving.engine.engine_thread"] = types.SimpleNamespace(EngineStopped=RuntimeError)  # it imports JAX
from serving.api.http.connection.server import Server
from serving.api.http.settings import ConnectionBounds

@contextlib.asynccontextmanager
async def lifespan(app):
    print("up", flush=True)
    yield
    print("leaving", flush=True)
    threading.Event().wait(60)  # as a step that does not end

server = Server(FastAPI(lifespan=lifespan), ConnectionBounds(), drain_timeout=60, leave=lambda: None)
server.run(sockets=[socket.create_server(("127.0.0.1", 0))])
"""


def test_a_second_interrupt_ends_a_server_that_hangs():
    process = subprocess.Popen([sys.executable, "-c", HANGS], stdout=subprocess.PIPE, text=True)
    try:
        for line in ("up\n", "leaving\n"):
            assert line_of(process) == line
            time.sleep(0.5)  # the signal handlers are installed after the lifespan has begun
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    options = "-addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out cert.pem"
    subprocess.run(f"{command} {options}".split(), cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture
def over_tls(certificate):
    """A server over TLS, its URL, and how clients verify it."""
    keys = {"ssl_keyfile": str(certificate / "key.pem"), "ssl_certfile": str(certificate / "cert.pem")}
    with small_server(keys, max_connections=20, header_timeout=1.0) as (server, url):
        context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        yield server, url.replace("http:", "https:"), context


def get(url, context):
    with httpx.Client(verify=context, timeout=30) as client:
        return {client.get(f"{url}/ready").status_code for _ in range(3)}


def test_requests_over_tls_are_answered(over_tls):
    _, url, context = over_tls
    assert get(url, context) == {200}
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url.replace('https:', 'http:')}/ready", timeout=30)
    assert get(url, context) == {200}


@pytest.mark.smoke
@pytest.mark.parametrize("sent", [b"\x16\x03\x01", b""])
def test_a_handshake_has_a_deadline(over_tls, sent):
    _, url, context = over_tls
    assert get(url, context) == {200}  # it runs
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(url)) for _ in range(10)]
        for wire in wires:
            wire.sendall(sent)
        assert all(closed(wire, 20) for wire in wires)
    assert get(url, context) == {200}


def test_silent_handshakes_count_as_connections(over_tls):
    server, url, context = over_tls
    assert get(url, context) == {200}  # it runs
    server.bounds = server.bounds.model_copy(update={"header_timeout": 30.0})
    room = server.bounds.max_connections + reserve(server.bounds.max_connections)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(connect(url)) for _ in range(room + 10)]
        assert all(closed(wire, 20) for wire in wires[room:])
        for wire in wires[20:room]:  # beyond the limit there is still room for refusals
            wire.close()

        def is_refused():
            answer = httpx.get(f"{url}/ready", verify=context, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_connections")
            return True

        assert comes_true(is_refused, every=0.1), "the server does not notice that the others have left"
        assert not any(closed(wire, 0.01) for wire in wires[:20])
    assert comes_true(lambda: httpx.get(f"{url}/ready", verify=context, timeout=30).status_code == 200)


def test_the_limit_of_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
