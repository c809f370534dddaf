"""TLS: a handshake has a deadline and counts as a connection. The number of open files is raised at the start."""

import contextlib
import resource
import shutil
import socket
import ssl
import subprocess
import time

import httpx
import pytest
from fastapi import FastAPI

from serving.api.http.connection.connections import raise_descriptor_limit, reserve
from serving.api.http.settings import ConnectionBounds
from tests.support.servers.live_server import running


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1",
            "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", folder / "key.pem", "-out", folder / "cert.pem",
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def place(certificate):
    """Address of a server over TLS, and the server."""
    app = FastAPI()

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    bounds = ConnectionBounds(max_connections=20, header_timeout=1.0)
    keys = {"ssl_keyfile": str(certificate / "key.pem"), "ssl_certfile": str(certificate / "cert.pem")}
    with running(app, bounds, **keys) as (server, url):
        yield ("127.0.0.1", int(url.rpartition(":")[2])), server


def get(place, certificate):
    context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
    with httpx.Client(verify=context, timeout=30) as client:
        answers = [client.get(f"https://127.0.0.1:{place[1]}/health") for _ in range(3)]
    return {answer.status_code for answer in answers}


def closed(wire, seconds):
    wire.settimeout(seconds)
    try:
        return wire.recv(1) == b""
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False


def test_requests_over_tls_are_answered(place, certificate):
    assert get(place[0], certificate) == {200}
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{place[0][1]}/health", timeout=30)
    assert get(place[0], certificate) == {200}


@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01"])
def test_a_handshake_has_a_deadline(place, certificate, sent):
    address, _ = place
    assert get(address, certificate) == {200}  # it runs
    wires = [socket.create_connection(address, timeout=30) for _ in range(10)]
    for wire in wires:
        if sent:
            wire.sendall(sent)
    assert all(closed(wire, 20) for wire in wires)
    for wire in wires:
        wire.close()
    assert get(address, certificate) == {200}


def test_silent_handshakes_count_as_connections(place, certificate):
    address, server = place
    assert get(address, certificate) == {200}  # it runs
    server._bounds = server._bounds.model_copy(update={"header_timeout": 30.0})
    room = server._bounds.max_connections + reserve(server._bounds.max_connections)
    with contextlib.ExitStack() as stack:
        wires = [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(room + 10)]
        late = wires[room:]
        assert all(closed(wire, 20) for wire in late)
        for wire in wires[20:room]:  # beyond the limit there is still room for refusals
            wire.close()
        context = ssl.create_default_context(cafile=str(certificate / "cert.pem"))
        url = f"https://127.0.0.1:{address[1]}/health"
        answer = None
        for _ in range(100):  # the server must notice that the others have left
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(url, verify=context, timeout=30)
                break
            time.sleep(0.1)
        assert answer is not None
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "too_many_connections"
        assert not any(closed(wire, 0.01) for wire in wires[:20])
    for _ in range(100):
        if (found := httpx.get(url, verify=context, timeout=30).status_code) == 200:
            break
        time.sleep(0.1)
    assert found == 200


def test_the_limit_of_open_files_is_raised():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, before[1]), before[1]))
        raise_descriptor_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
