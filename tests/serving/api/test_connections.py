"""Bounds on one connection, over sockets."""

import socket

import pytest


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
