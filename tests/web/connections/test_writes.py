"""How answers are written to the socket: a small one at once, and the head of a slow one before its body."""

from __future__ import annotations

import socket
import struct
import sys

import pytest

from tests.web.connections.conftest import GET, HEADER, Serve, read_answer, read_to_end

DATA_SEGMENTS_IN = 152
"""Where Linux has their number in `struct tcp_info` (linux/tcp.h), as 32 bits."""


def segments(connection: socket.socket) -> int:
    """With data that have come: loopback makes one of each write that is not large."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DATA_SEGMENTS_IN + 4)
    found: int = struct.unpack_from("=I", info, DATA_SEGMENTS_IN)[0]
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts segments")
def test_a_small_answer_is_written_at_once(edge: Serve) -> None:
    connection = edge().connect(GET)
    for answered in range(1, 4):
        assert read_answer(connection).endswith(b"}")
        assert segments(connection) == answered
        connection.sendall(GET)


def test_the_head_of_an_answer_does_not_wait_for_its_body(edge: Serve) -> None:
    connection = edge().connect(b"GET /late-body HTTP/1.1\r\n" + HEADER + b"\r\n")
    assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
    assert b"late" in connection.recv(1 << 16)


@pytest.mark.parametrize("path", [b"/head-alone", b"/head-and-failure"])
def test_an_answer_that_breaks_off_behind_its_head_is_not_taken_for_none(edge: Serve, path: bytes) -> None:
    """A client may repeat a request whose connection ends without a byte: it was not seen."""
    connection = edge().connect(b"GET " + path + b" HTTP/1.1\r\n" + HEADER + b"\r\n")
    assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_a_head_without_a_body_comes_by_itself(edge: Serve) -> None:
    connection = edge().connect(GET.replace(b"GET", b"HEAD"))
    assert connection.recv(1 << 16).endswith(b"\r\n\r\n")
    connection.sendall(GET)
    assert read_answer(connection).endswith(b"}")


def test_behind_a_body_of_two_lengths_nothing_is_read(edge: Serve) -> None:
    """RFC 9112, 6.1: what comes behind it may be of it."""
    head = b"POST /v1/sessions HTTP/1.1\r\n" + HEADER + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n"
    answers = read_to_end(edge().connect(head + b"2\r\n{}\r\n0\r\n\r\n" + GET))
    assert answers.startswith(b"HTTP/1.1 400 ")
    assert answers.count(b"HTTP/1.1") == 1
