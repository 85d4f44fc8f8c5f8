"""What a client gets that still sends when its last answer comes, and how long its connection is kept."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from tests.web.connections.conftest import HEADER, Edge, read_to_end, serving, wait_until

MIB = 1 << 20
CHUNKED = b"Transfer-Encoding: chunked\r\n"


@pytest.fixture(scope="module")
def guarded() -> Iterator[Edge]:
    """A server with a key, which the tests share."""
    with serving(api_keys=("sesame",)) as server:
        yield server


def post(path: bytes, *headers: bytes) -> bytes:
    return b"POST " + path + b" HTTP/1.1\r\n" + HEADER + b"".join(headers) + b"\r\n"


def assert_last(answer: bytes, status: int, code: str) -> None:
    """The answer came whole, and said that it is the last one."""
    header, _, body = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in header.lower()
    assert json.loads(body)["error"]["code"] == code


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        (post(b"/v1/sessions", b"Content-Length: 8000000\r\n"), 401, "invalid_api_key"),
        (post(b"/v1/sessions", CHUNKED), 401, "invalid_api_key"),
        (post(b"/v1/sessions", b"Content-Length: 9\r\n", b"Expect: 100-continue\r\n"), 401, "invalid_api_key"),
        (post(b"/v1/sessions/import", b"Content-Length: 5000000000\r\n"), 401, "invalid_api_key"),
        (b"GET /health HTTP/1.1\r\n" + HEADER + b"Content-Length: 1500000000\r\n\r\n", 413, "request_too_large"),
    ],
)
def test_a_large_body_is_not_read_after_its_answer(guarded: Edge, request_: bytes, status: int, code: str) -> None:
    connection = guarded.connect(request_)
    assert_last(read_to_end(connection), status, code)
    wait_until(lambda: _is_reset(connection))


def test_who_sends_on_before_reading_gets_the_answer(guarded: Edge) -> None:
    connection = guarded.connect(post(b"/v1/sessions/import", b"Content-Length: 5000000000\r\n"))
    connection.sendall(bytes(8 * MIB))
    assert_last(read_to_end(connection), 401, "invalid_api_key")


def _is_reset(connection: socket.socket) -> bool:
    """Whether the server has closed the connection."""
    try:
        connection.sendall(b"x")
    except ConnectionError:
        return True
    return False
