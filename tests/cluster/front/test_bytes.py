"""Chunked bodies and first messages of WebSockets, in whatever pieces they come."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from websockets.frames import Frame, Opcode

from app.cluster.front.upstream.chunks import BadChunks, Chunks
from app.cluster.front.websockets.frames import BadFrame, FirstMessage


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


def test_a_ping_costs_no_copy_of_what_came_before() -> None:
    first = FirstMessage(8 << 20)
    first.take(part(b"x" * (4 << 20), Opcode.TEXT) + part(b"x"))  # memory grows by an eighth at once
    tracemalloc.start()
    try:
        first.take(PING)
        first.take(part(b"y")[:3])
        first.take(part(b"y")[3:] + PING)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_one_that_is_too_long_is_refused_before_it_has_come() -> None:
    first = FirstMessage(1000)
    first.take(part(b"x" * 900, Opcode.TEXT))
    with pytest.raises(BadFrame, match="at most 1000"):
        first.take(part(b"x" * 200)[:10])
