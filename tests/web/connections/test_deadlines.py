"""Clients that keep the server waiting lose their connection; those that only are slow, or wait themselves, keep it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import httpx
import pytest
from openai import OpenAI

from tests.web.connections.conftest import (
    BIG,
    GET,
    HEADER,
    QUIET_S,
    Edge,
    is_refused,
    read_answer,
    read_to_end,
    serving,
    wait_until,
)

SHORT = {"header_timeout_s": 0.4, "body_timeout_s": 0.4, "write_timeout_s": 0.4}

POST = b"POST /v1/sessions HTTP/1.1\r\nContent-Type: application/json\r\n" + HEADER


@pytest.fixture(scope="module")
def impatient() -> Iterator[Edge]:
    """A server with those deadlines, which the tests share."""
    with serving(**SHORT) as server:
        yield server


def ended(server: Edge, cause: str) -> float:
    return server.metric("djinn_connections_ended_total", cause=cause)


def assert_timed_out(answer: bytes) -> None:
    header, _, body = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 408 ")
    assert b"x-request-id: " in header
    assert b"connection: close" in header
    assert json.loads(body)["error"]["code"] == "request_timeout"


def test_a_connection_that_says_nothing_is_closed_and_half_a_header_is_answered_first(impatient: Edge) -> None:
    before = ended(impatient, "header")
    silent, halves = impatient.connect(), [impatient.connect(begun) for begun in (b"G", GET[:-2])]
    assert read_to_end(silent) == b""
    for half in halves:
        assert_timed_out(read_to_end(half))
    assert ended(impatient, "header") == before + 3


def test_a_header_that_comes_byte_by_byte_does_not_last(impatient: Edge) -> None:
    connection = impatient.connect(b"GET /health HTTP/1.1\r\n")
    connection.settimeout(0.1)
    for _ in range(300):
        try:
            connection.sendall(b"x")
            if connection.recv(1) == b"H":
                return
        except TimeoutError:
            pass
        except ConnectionError:
            return
    pytest.fail("the connection is still open")


@pytest.mark.parametrize(
    "begun",
    [
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n",
        b"POST /v1/sessions/import HTTP/1.1\r\nContent-Length: 100\r\n" + HEADER + b"\r\nxx",
    ],
)
def test_a_body_that_stops_is_answered_and_closed(
    impatient: Edge, begun: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    before, sessions = ended(impatient, "body"), impatient.metric("djinn_sessions")
    assert_timed_out(read_to_end(impatient.connect(begun)))
    assert ended(impatient, "body") == before + 1
    assert impatient.metric("djinn_sessions") == sessions
    assert [record for record in caplog.records if record.exc_info] == []


def test_what_is_left_of_a_body_after_the_answer_has_one_deadline_in_all(impatient: Edge) -> None:
    connection = impatient.connect(b"POST /nowhere HTTP/1.1\r\nContent-Length: 100000\r\n" + HEADER + b"\r\n")
    assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
    wait_until(lambda: is_refused(connection, b"x"))


def test_an_upload_may_take_long_if_it_goes_on(impatient: Edge) -> None:
    with httpx.Client(base_url=impatient.url, timeout=30) as http:
        session = http.post("/v1/sessions").json()["id"]
        http.post(f"/v1/sessions/{session}/generate", json={"token_ids": [5] * 20, "max_tokens": 5})
        file = http.get(f"/v1/sessions/{session}/export").content
    head = b"POST /v1/sessions/import HTTP/1.1\r\nContent-Length: %d\r\n" % len(file)
    connection = impatient.connect(head + HEADER + b"\r\n")
    step = -(-len(file) // 8)
    for start in range(0, len(file), step):
        time.sleep(0.1)
        connection.sendall(file[start : start + step])
    assert read_answer(connection).startswith(b"HTTP/1.1 201 ")


def test_a_client_may_wait_for_each_part_of_an_answer_and_be_idle_before_the_next_request(impatient: Edge) -> None:
    for path, body in (("/quiet-stream", b"begun late"), ("/quiet", b"late")):
        assert httpx.get(f"{impatient.url}{path}", timeout=30).content == body
    connection = impatient.connect(GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
    time.sleep(QUIET_S)
    connection.sendall(GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(GET[:20])
    assert_timed_out(read_to_end(connection))


def test_a_websocket_may_be_idle(impatient: Edge) -> None:
    with OpenAI(base_url=f"{impatient.url}/v1", api_key="none") as client, client.responses.connect() as socket:
        for pause in (QUIET_S, 0):
            socket.response.create(model="tiny-llama", input="a", max_output_tokens=1)
            while socket.recv().type not in ("response.completed", "response.incomplete"):
                pass
            time.sleep(pause)


def test_who_does_not_read_an_answer_loses_it_and_the_session_with_it(impatient: Edge) -> None:
    asked: dict[str, object] = {"model": "tiny-llama", "prompt": "a", "n": 4, "max_tokens": 900, "ignore_eos": True}
    body = json.dumps({**asked, "logprobs": 20, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n" % len(body)
    before, sessions = ended(impatient, "unread"), impatient.metric("djinn_sessions")
    impatient.connect(head + HEADER + b"\r\n" + body, small_window=True)
    wait_until(lambda: ended(impatient, "unread") == before + 1)
    wait_until(lambda: impatient.metric("djinn_sessions") == sessions)
    connection = impatient.connect(b"GET /big HTTP/1.1\r\n" + HEADER + b"\r\n", small_window=True)
    wait_until(lambda: ended(impatient, "unread") == before + 2)
    with pytest.raises(ConnectionResetError):
        read_to_end(connection)


def test_who_reads_slowly_gets_everything(impatient: Edge) -> None:
    request = b"GET /big HTTP/1.1\r\nConnection: close\r\n" + HEADER + b"\r\n"
    connection = impatient.connect(request, small_window=True)
    received, paused = bytearray(), 0
    while part := connection.recv(1 << 14):
        received += part
        if len(received) >= paused:  # the pauses add up to more than the deadline
            time.sleep(0.08)
            paused += len(BIG) // 20
    assert received.endswith(BIG)
