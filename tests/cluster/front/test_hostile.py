"""What the front door refuses, as servers do, in whatever pieces it comes. No replica takes it for something else."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from websockets.frames import Frame, Opcode

from app.cluster.front.upstream.chunks import BadChunks, Chunks
from app.cluster.front.websockets.frames import BadFrame, FirstMessage
from tests.cluster.front.doors import Door, serving_door, serving_stub
from tests.waiting import PATIENCE_S

HEAD = b"Host: localhost\r\n"
SESSION = b"/v1/sessions/ses_a_" + b"0" * 36


class Stub:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, int]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        content = await request.body()
        if scope["path"] != "/ready":
            self.seen.append((request.method, scope["path"], len(content)))
        await Response(b"fine")(scope, receive, send)


@pytest.fixture(scope="module")
def stub() -> Stub:
    return Stub()


@pytest.fixture(scope="module")
def small_door(stub: Stub) -> Iterator[Door]:
    limits: dict[str, Any] = {"max_request_bytes": 1000, "header_timeout_s": 0.4, "body_timeout_s": 0.4}
    with serving_stub(stub) as url, serving_door({"a": url}, **limits) as door:
        yield door


def _answer(door: Door, sent: bytes) -> bytes:
    with socket.create_connection(door.address, PATIENCE_S) as connection:
        connection.sendall(sent)
        return connection.makefile("rb").read()


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n", 403),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: gzip\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\nx", 415),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 1001\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\n400\r\n" + b"x" * 1024, 413),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\n" + HEAD + b"Content-Length: 9\r\n\r\nlate", 408),
        (b"GET / HTTP/1.1\r\nHost: loc", 408),
    ],
)
def test_what_no_server_here_takes_is_refused_at_the_front_door(
    small_door: Door, stub: Stub, sent: bytes, status: int
) -> None:
    before = len(stub.seen)
    received = _answer(small_door, sent.replace(b"\r\n" + HEAD, b"\r\nConnection: close\r\n" + HEAD, 1))
    assert received.startswith(b"HTTP/1.1 %d" % status), received[:200]
    assert b'"error"' in received
    assert len(stub.seen) == before


def test_a_second_request_in_a_body_stays_a_body(small_door: Door, stub: Stub) -> None:
    hidden = b"DELETE " + SESSION + b" HTTP/1.1\r\n" + HEAD + b"\r\n"
    stub.seen.clear()
    length = b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(hidden)
    assert _answer(small_door, b"POST /x HTTP/1.1\r\n" + HEAD + length + hidden).startswith(b"HTTP/1.1 200")
    chunked = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    assert _answer(small_door, b"POST /x HTTP/1.1\r\n" + HEAD + chunked).startswith(b"HTTP/1.1 200")
    assert stub.seen == [("POST", "/x", len(hidden))] * 2


def test_requests_behind_each_other_are_answered_in_order(small_door: Door, stub: Stub) -> None:
    stub.seen.clear()
    first = b"POST /1 HTTP/1.1\r\n" + HEAD + b"Content-Length: 2\r\n\r\nab"
    last = b"GET /2 HTTP/1.1\r\n" + HEAD + b"Connection: close\r\n\r\n"
    assert _answer(small_door, first + last).count(b"HTTP/1.1 200") == 2
    assert stub.seen == [("POST", "/1", 2), ("GET", "/2", 0)]


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"[" * 900, b'{"previous_response_id": 7}', b"\xff\xfe"])
def test_a_call_that_cannot_be_read_is_the_replicas_to_refuse(small_door: Door, content: bytes) -> None:
    assert httpx.post(f"{small_door.url}/v1/responses", content=content).status_code == 200


@given(st.lists(st.binary(min_size=1, max_size=300), max_size=6), st.lists(st.integers(1, 200), min_size=1))
def test_all_but_the_last_chunk_passes_as_it_came(parts: list[bytes], cuts: list[int]) -> None:
    chunks, passed, place = Chunks(), b"", 0
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    whole = body + b"0\r\n\r\n"
    while place < len(whole):
        assert not chunks.is_over
        size = cuts[0]
        cuts = cuts[1:] + cuts[:1]
        passed += chunks.take(whole[place : place + size])
        place += size
    assert (passed, chunks.is_over, chunks.is_clean) == (body, True, True)


@pytest.mark.parametrize("rest", [b"X: trailer\r\n\r\n", b"\r\nHTTP/1.1 200"])
def test_a_connection_is_not_used_again_if_more_comes(rest: bytes) -> None:
    chunks = Chunks()
    assert chunks.take(b"1\r\nx\r\n0\r\n" + rest) == b"1\r\nx\r\n"
    assert (chunks.is_over, chunks.is_clean) == (True, False)


@pytest.mark.parametrize("bad", [b"\r\n", b"-1\r\n", b"+1\r\n", b"xyz\r\n", b"1" * 70, b"1_0\r\n", b" \r\n"])
def test_what_has_no_size_is_no_chunk(bad: bytes) -> None:
    with pytest.raises(BadChunks):
        Chunks().take(bad)


PING = Frame(Opcode.PING, b"are you there?").serialize(mask=True)


def part(data: bytes, opcode: Opcode = Opcode.CONT, *, is_last: bool = False) -> bytes:
    return Frame(opcode, data, is_last).serialize(mask=True)


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_it_is_the_same_in_any_pieces(size: int) -> None:
    frames = part(b"a" * 200, Opcode.TEXT), part(b""), part(b"b" * 70_000, is_last=True)
    sent, first, passed = frames[0] + PING + frames[1] + PING + frames[2] + b"behind", FirstMessage(100_000), b""
    for begin in range(0, len(sent), size):
        passed += first.take(sent[begin : begin + size])
    assert passed == PING + PING
    assert first.content == b"a" * 200 + b"b" * 70_000
    assert first.kept == b"".join(frames) + b"behind"
    assert first.kept_bytes == len(first.kept)


def test_one_that_is_too_long_is_refused_before_it_has_come() -> None:
    first = FirstMessage(1000)
    first.take(part(b"x" * 900, Opcode.TEXT))
    with pytest.raises(BadFrame, match="at most 1000"):
        first.take(part(b"x" * 200)[:10])
