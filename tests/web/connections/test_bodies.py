"""Requests that come in tiny pieces, too slowly, after their answer, or as no HTTP; and how answers are written."""

import asyncio
import json
import socket
import struct
import sys
import time
from collections.abc import Iterator
from itertools import count

import httpx
import pytest
from openai import OpenAI

from app.web import connections
from app.web.connections import BURST, DROPPED_BYTES, FULL_BYTES, GRACE_S, MOST_LINGERING, PER_S, Lingering, SmallPieces
from tests.waiting import wait_until
from tests.web.connections.conftest import (
    BIG,
    GET,
    HEADER,
    QUIET_S,
    Edge,
    Serve,
    is_refused,
    read_answer,
    read_to_end,
    serving,
)

POST = b"POST /v1/sessions HTTP/1.1\r\nContent-Type: application/json\r\n" + HEADER
IMPORT = b"POST /v1/sessions/import HTTP/1.1\r\n" + HEADER
NOWHERE = b"POST /nowhere HTTP/1.1\r\n" + HEADER + b"Content-Length: 10\r\n\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def assert_last(answer: bytes, status: int, code: str, says: str = "") -> None:
    """The answer came whole, and said that it is the last one."""
    header, _, body = answer.partition(b"\r\n\r\n")
    assert header.startswith(b"HTTP/1.1 %d " % status)
    assert b"connection: close" in header.lower()
    assert json.loads(body)["error"]["code"] == code
    assert says in json.loads(body)["error"]["message"]


def test_a_refusal_of_a_small_body_keeps_the_connection(server: Edge) -> None:
    for before, after in ((b"x" * 10, b""), (b"", b"x" * 10)):
        connection = server.connect(NOWHERE + before)
        assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
        connection.sendall(after + GET)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_empty_lines_before_a_request_are_skipped(server: Edge) -> None:
    connection = server.connect(b"\r\n\r\n" + GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
    connection.sendall(NOWHERE + b"x" * 10 + b"\r\n")
    assert read_answer(connection).startswith(b"HTTP/1.1 404 ")
    connection.sendall(b"\r")
    connection.sendall(b"\n" + GET)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("target", [b"http://localhost/v1/models?a=1", b"HTTPS://x:1/v1/models/", b"/v1/models//"])
def test_a_target_may_name_its_host_and_end_in_a_slash(server: Edge, target: bytes) -> None:
    connection = server.connect(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % target)
    assert read_answer(connection).startswith(b"HTTP/1.1 200 ")


def test_who_owes_a_body_after_its_answer_gives_way(edge: Serve) -> None:
    server = edge(max_connections=3)
    owing = [server.connect(NOWHERE) for _ in range(3)]
    for each in owing:
        assert read_answer(each).startswith(b"HTTP/1.1 404 ")
    time.sleep(2 * GRACE_S)
    assert read_answer(server.connect(GET)).startswith(b"HTTP/1.1 200 ")
    assert read_to_end(owing[0]) == b""


def test_small_chunks_are_taken_if_they_are_few_or_not_that_small_and_else_refused(server: Edge) -> None:
    for size, chunks in ((256, 1100), (1, 500)):
        chunk = b"%x\r\n%s\r\n" % (size, b" " * size)
        connection = server.connect(CHUNKED + chunk * chunks + b"2\r\n{}\r\n0\r\n\r\n")
        assert read_answer(connection).startswith(b"HTTP/1.1 201 ")
        connection.sendall(GET)
        assert read_answer(connection).startswith(b"HTTP/1.1 200 ")
    before = server.metric("djinn_sessions")
    connection = server.connect(CHUNKED + b"1\r\n \r\n" * 5000)
    assert_last(read_to_end(connection), 400, "malformed_request", "too many small chunks")
    assert server.metric("djinn_sessions") == before


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"nonsense\r\n\r\n", "its first line is not a method, a target and HTTP/1.1"),
        (GET[:-2] + b"a:b\r\n" * 50_000 + b"\r\n", "its head, or the line before a chunk of its body, has"),
        (GET[:-2] + b"ab\r\n\r\n", "a line of its head is not a name, a colon and a value"),
        (GET[:-2] + b"Content-Length: x\r\n\r\n", "its Content-Length is no number of bytes"),
        (CHUNKED + b"one\r\n", "a chunk of its body does not begin with a length in hexadecimal digits"),
    ],
)
def test_what_is_not_http_is_refused_by_name(server: Edge, sent: bytes, says: str) -> None:
    assert_last(read_to_end(server.connect(sent)), 400, "malformed_request", f"the request cannot be read: {says}")


@pytest.fixture(scope="module")
def guarded() -> Iterator[Edge]:
    with serving(api_keys=("sesame",)) as server:
        yield server


@pytest.mark.parametrize(
    ("head", "status", "code"),
    [
        (POST + b"Content-Length: 8000000\r\n", 401, "invalid_api_key"),
        (POST + b"Transfer-Encoding: chunked\r\n", 401, "invalid_api_key"),
        (POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n", 401, "invalid_api_key"),
        (GET[:-2] + b"Content-Length: 1500000000\r\n", 413, "request_too_large"),
    ],
)
def test_a_large_body_is_not_read_after_its_answer(
    guarded: Edge, head: bytes, status: int, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = guarded.connect(head + b"\r\n")
    assert_last(read_to_end(connection), status, code)
    wait_until(lambda: is_refused(connection, b"x"))
    monkeypatch.setattr(connections, "LINGER_S", 30.0)
    connection = guarded.connect(IMPORT + b"Content-Length: 5000000000\r\n\r\n")
    connection.sendall(bytes(8 << 20))  # before it reads
    assert_last(read_to_end(connection), 401, "invalid_api_key")


async def test_of_what_is_sent_after_the_answer_no_more_than_a_bound_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_S", 30.0)
    loop = asyncio.get_running_loop()
    lingering = Lingering()
    ended, client = socket.socketpair()
    client.setblocking(False)
    lingering.take(ended)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await loop.sock_sendall(client, bytes(2 * DROPPED_BYTES))
    assert ended.fileno() >= 0
    lingering.close()
    assert ended.fileno() < 0
    client.close()


async def test_a_connection_stays_until_its_client_closes_or_too_many_stay() -> None:
    lingering = Lingering()
    pairs = [socket.socketpair() for _ in range(MOST_LINGERING + 1)]
    for ended, _ in pairs:
        lingering.take(ended)
    assert [ended.fileno() >= 0 for ended, _ in pairs] == [False] + [True] * MOST_LINGERING
    pairs[1][1].close()
    await asyncio.to_thread(wait_until, lambda: pairs[1][0].fileno() < 0)
    assert pairs[2][0].fileno() >= 0
    lingering.close()
    assert all(ended.fileno() < 0 for ended, _ in pairs)
    for _, client in pairs:
        client.close()


def taken_at_once(pieces: SmallPieces, size: int, now: float) -> int:
    return next(number for number in count() if not pieces.take(size, now))


def test_tiny_pieces_have_a_bound_which_time_restores_and_pieces_that_are_not_small_have_none() -> None:
    assert taken_at_once(SmallPieces(), 0, 7.0) == BURST
    assert taken_at_once(SmallPieces(), FULL_BYTES // 2, 7.0) == 2 * BURST
    pieces = SmallPieces()
    assert all(pieces.take(size, 7.0) for size in [FULL_BYTES, 1 << 16] * 2 * BURST)
    assert taken_at_once(pieces, 0, 7.0) == BURST, "large ones pay for no others"
    pieces = SmallPieces()
    assert all(pieces.take(0, number / PER_S) for number in range(10 * BURST))
    taken_at_once(pieces, 0, 1000.0)
    assert taken_at_once(pieces, 0, 2000.0) == BURST, "never for more than at first"


DATA_SEGMENTS_IN = 152
"""Where Linux has their number in `struct tcp_info` (linux/tcp.h), as 32 bits."""


def segments(connection: socket.socket) -> int:
    """With data that have come: loopback makes one of each write that is not large."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DATA_SEGMENTS_IN + 4)
    found: int = struct.unpack_from("=I", info, DATA_SEGMENTS_IN)[0]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts segments")
def test_a_small_answer_is_written_at_once(server: Edge) -> None:
    connection = server.connect(GET)
    for answered in range(1, 4):
        assert read_answer(connection).endswith(b"}")
        assert segments(connection) == answered
        connection.sendall(GET)


def test_the_head_of_an_answer_comes_by_itself_if_it_must(server: Edge) -> None:
    connection = server.connect(b"GET /quiet-stream?late HTTP/1.1\r\n" + HEADER + b"\r\n")
    assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
    assert b"late" in connection.recv(1 << 16)
    connection = server.connect(GET.replace(b"GET", b"HEAD"))
    assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
    connection.sendall(GET)
    assert read_answer(connection).endswith(b"}")
    for how in (b"returns", b"fails"):  # a client may repeat a request whose connection ends without a byte
        connection = server.connect(b"GET /break-off?how=" + how + b" HTTP/1.1\r\n" + HEADER + b"\r\n")
        assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_behind_a_body_of_two_lengths_nothing_is_read(server: Edge) -> None:
    """RFC 9112, 6.1: what comes behind it may be of it."""
    head = b"POST /v1/sessions HTTP/1.1\r\n" + HEADER + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    answers = read_to_end(server.connect(head + b"2\r\n{}\r\n0\r\n\r\n" + GET))
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1") == 1


SHORT = {"header_timeout_s": 1.0, "body_timeout_s": 1.0, "write_timeout_s": 1.0}


@pytest.fixture(scope="module")
def impatient() -> Iterator[Edge]:
    """A server with those deadlines, which the tests share."""
    with serving(**SHORT) as server:
        yield server


def ended(server: Edge, cause: str) -> float:
    return server.metric("djinn_connections_ended_total", cause=cause)


def assert_timed_out(answer: bytes) -> None:
    assert_last(answer, 408, "request_timeout")
    assert b"x-request-id: " in answer


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
    step = -(-len(file) // 6)
    for start in range(0, len(file), step):
        time.sleep(0.2)
        connection.sendall(file[start : start + step])
    assert read_answer(connection).startswith(b"HTTP/1.1 201 ")


@pytest.mark.long
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
            time.sleep(0.1)
            paused += len(BIG) // 12
    assert received.endswith(BIG)
