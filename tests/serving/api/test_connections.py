"""Bounds on one connection, and on all of them together, over sockets."""

import asyncio
import contextlib
import socket
import threading
from functools import partial

import httpx
import pytest
from fastapi import FastAPI, Request

from serving.api.http.connection import connections
from serving.api.http.connection.server import Server
from serving.api.http.settings import ConnectionBounds
from serving.split.router.relay import Relay
from serving.split.router.workers import Fleet
from serving.split.settings import RouterSettings
from tests.support.fake_workers import BODY, asked


@contextlib.contextmanager
def running(**bounds):
    """Address of a small server."""
    app = FastAPI()

    @app.get("/ready")
    async def ready() -> dict[str, str]:
        return {"status": "ready"}

    @app.post("/v1/completions")
    async def complete(request: Request) -> dict[str, int]:
        return {"port": request.url.port or 0}

    listening = socket.create_server(("127.0.0.1", 0), backlog=200)
    server = Server(app, ConnectionBounds(**bounds), drain_timeout=1.0, leave=lambda: None)
    thread = threading.Thread(target=partial(server.run, sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield listening.getsockname()
    finally:
        server.should_exit = True
        thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def silent(address, count):
    """So many connections that have been accepted and send nothing."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            wire = stack.enter_context(socket.create_connection(address, timeout=30))
            wire.sendall(b"GET")
        yield


@pytest.mark.parametrize("size", [10, 300_000])
def test_requests_beyond_the_limit_of_connections_get_503(size):
    """The client gets the answer however large its body is, and requests are served again once there is room."""
    with running(max_connections=3) as address:
        url = f"http://127.0.0.1:{address[1]}"
        for _ in range(2):
            assert httpx.get(f"{url}/ready", timeout=30).status_code == 200
            with silent(address, 3):
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
    with running(max_connections=3, header_timeout=60) as address, contextlib.ExitStack() as stack:
        wires = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(most + 5)]
        assert [_closes(wire) for wire in wires[3:]] == [True] * (len(wires) - 3)
        for wire in wires[:3]:
            wire.settimeout(0.1)
            with pytest.raises(TimeoutError):
                wire.recv(1)


def _closes(wire):
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_router_retries_elsewhere_what_a_full_worker_refuses():
    async def run(urls):
        async with httpx.AsyncClient() as client:
            fleet = Fleet.of([], urls, client)
            relay, served = Relay(fleet, RouterSettings.create(decode=tuple(urls))), []
            for i in range(8):
                answer = await relay.answer(asked("completions", BODY | {"prompt": f"text {i}"}))
                served.append((answer.status, b"".join([piece async for piece in answer.body])))
            for _ in range(4):
                for worker in fleet.decode:
                    await fleet._check_health(worker, with_manifest=False)
            return served, [(worker.up, worker.failures, worker.missed) for worker in fleet.decode]

    with running(max_connections=3) as full, running(max_connections=3) as other, silent(full, 3):
        served, workers = asyncio.run(run([f"http://127.0.0.1:{port}" for _, port in (full, other)]))
        assert served == [(200, b'{"port":%d}' % other[1])] * 8
        assert workers == [(True, 0, 0)] * 2


def answer_to(server, request: bytes) -> bytes:
    """All bytes that come back until the server closes the connection."""
    _, _, address = server.url.partition("//")
    host, _, port = address.partition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(request)
        found = b""
        try:
            while piece := connection.recv(65536):
                found += piece
        except ConnectionResetError:
            pass
        return found


@pytest.mark.parametrize("pieces", ["one header", "many headers", "the path"])
def test_a_head_that_comes_complete_in_one_piece_is_bounded(server, pieces):
    most = server.context.settings.max_header_bytes
    beyond = {
        "one header": b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\nx: " + b"y" * most + b"\r\n\r\n",
        "many headers": b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
        + b"x: y\r\n" * (most // 6)
        + b"\r\n",
        "the path": b"GET /health?" + b"y" * most + b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    }
    assert answer_to(server, beyond[pieces]) == b""


def test_a_body_in_the_same_piece_does_not_count_as_head(server):
    body = b'{"prompt": "' + b"x" * (2 * server.context.settings.max_header_bytes) + b'"}'
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    answer = answer_to(server, head + b"content-length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 ")
