"""Bodies that come after their answer, or in tiny pieces; and what is not HTTP at all."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from app.web.connections.table import GRACE_S
from tests.web.connections.conftest import GET, HEADER, Edge, Serve, read_answer, read_to_end, serving

POST = b"POST /v1/sessions HTTP/1.1\r\nContent-Type: application/json\r\n" + HEADER
NOWHERE = b"POST /nowhere HTTP/1.1\r\n" + HEADER + b"Content-Length: 10\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Edge]:
    """A server that the tests share."""
    with serving() as server:
        yield server


def assert_refused(answer: bytes, says: str) -> None:
    header, _, body = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in header
    error = json.loads(body)["error"]
    assert error["code"] == "malformed_request"
    assert says in error["message"]


@pytest.mark.parametrize("pause", [False, True])
def test_a_refusal_of_a_small_body_keeps_the_connection(server: Edge, pause: bool) -> None:
    connection = server.connect(NOWHERE if pause else NOWHERE + b"x" * 10)
    assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
    connection.sendall(b"x" * 10 * pause + GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_who_owes_a_body_after_its_answer_gives_way(edge: Serve) -> None:
    server = edge(max_connections=3)
    owing = [server.connect(NOWHERE) for _ in range(3)]
    for each in owing:
        assert read_answer(each).startswith(b"HTTP/1.1 404 ")
    time.sleep(2 * GRACE_S)
    assert read_answer(server.connect(GET)).startswith(b"HTTP/1.1 200 ")
    assert read_to_end(owing[0]) == b""


def test_a_body_in_tiny_chunks_is_refused(server: Edge) -> None:
    connection = server.connect(CHUNKED + b"1\r\n \r\n" * 5000)
    assert_refused(read_to_end(connection), "too many small chunks")
    assert server.metric("djinn_sessions") == 0


@pytest.mark.parametrize(("size", "count"), [(256, 4000), (1, 500)])
def test_small_chunks_are_taken_if_they_are_few_or_not_that_small(server: Edge, size: int, count: int) -> None:
    chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
    connection = server.connect(CHUNKED + chunk * count + b"2\r\n{}\r\n0\r\n\r\n")
    assert read_answer(connection).startswith(b"HTTP/1.1 201 ")
    connection.sendall(GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"nonsense\r\n\r\n", "illegal request line"),
        (GET[:-2] + b"a:b\r\n" * 50_000 + b"\r\n", "too long"),
        (CHUNKED + b"one\r\n", "illegal chunk header"),
    ],
)
def test_what_is_not_http_is_refused_by_name(server: Edge, sent: bytes, says: str) -> None:
    assert_refused(read_to_end(server.connect(sent)), says)
