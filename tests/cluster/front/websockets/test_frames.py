"""The first message of a WebSocket, in whatever pieces it comes."""

from __future__ import annotations

import tracemalloc

import pytest
from websockets.frames import Frame, Opcode

from app.cluster.front.websockets.frames import BadFrame, FirstMessage

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
