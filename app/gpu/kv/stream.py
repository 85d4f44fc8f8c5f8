"""One session's tokens and KV on a connection between the engines of two servers.

    header     as that of a file (`kv/header.py`), which says whose KV it is and how much
    token_ids  I32 [tokens]
    kv         block after block, as the pool holds them

No checksum follows: TCP has its own, and the two servers trust each other. What does not come whole is worth nothing.
"""

from __future__ import annotations

import socket
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.gpu.kv.file import MAX_HEADER_BYTES, zero_after
from app.gpu.state.kv_header import (
    LENGTH_BYTES,
    TOKEN_BYTES,
    KVFileDamaged,
    KVFileHeader,
    KVIdentity,
    check_tokens,
    encode_header,
    match_header,
    parse_header,
)

SILENCE_S = 10.0
"""How long a connection may take for `SLICE_BYTES`, either way."""
SLICE_BYTES = 1 << 20
"""Sent at once, and waited for at once: a receiver that is woken for less takes turns with the sender."""


def send_kv(connection: socket.socket, header: KVFileHeader, spans: Sequence[memoryview]) -> int:
    """Send it all; returns how many bytes. `spans` are the header's blocks, neighbours joined.

    What is in the last block beyond the computed tokens is sent as zeros. Raises `OSError`.
    """
    connection.settimeout(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lead = encode_header(header) + array("i", header.token_ids).tobytes()
    connection.sendall(lead)
    sent, layout = len(lead), header.identity.layout
    used, parts = header.computed_tokens % layout.block_size, list[memoryview | bytearray](spans)
    if used:
        last = spans[-1]
        parts[-1:] = [last[: -layout.block_bytes], zero_after(last[-layout.block_bytes :], used, layout)]
    for part in parts:
        for first in range(0, len(part), SLICE_BYTES):  # the time limit of `sendall` is for all that it is given
            connection.sendall(part[first : first + SLICE_BYTES])
        sent += len(part)
    return sent


def receive_lead(connection: socket.socket, expected: KVIdentity, *, max_tokens: int) -> KVFileHeader:
    """The header with tokens, of which there may be `max_tokens`; the blocks follow.

    Raises any `KVFileError` if it is not of the `expected` model and layout, `OSError`.
    """
    connection.settimeout(SILENCE_S)
    start = receive(connection, LENGTH_BYTES)
    header_bytes = int.from_bytes(start, "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise KVFileDamaged("it does not begin with the length of its header")
    text = receive(connection, header_bytes)
    header = match_header(parse_header(text, max_tokens), expected)
    if encode_header(header) != start + text:
        raise KVFileDamaged("its header is not as Djinn writes it")
    token_ids = array("i", receive(connection, len(header.token_ids) * TOKEN_BYTES))
    check_tokens(token_ids, expected)
    return replace(header, token_ids=token_ids)


def receive(connection: socket.socket, count: int) -> bytes:
    """The next `count` bytes. Raises `OSError` if they do not come."""
    found = bytearray(count)
    receive_into(connection, [memoryview(found)])
    return bytes(found)


def receive_into(connection: socket.socket, spans: Sequence[memoryview]) -> None:
    """Fill the spans, one after the other. Raises `OSError` if not enough comes."""
    left, least = sum(map(len, spans)), 0
    for span in spans:
        rest = span
        while rest:
            if least != min(left, SLICE_BYTES):
                least = min(left, SLICE_BYTES)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, least)
            count = connection.recv_into(rest)
            if not count:
                raise ConnectionError("the other server has closed the connection before all had come")
            rest, left = rest[count:], left - count


def each_block(connection: socket.socket, count: int, block_bytes: int) -> Iterator[memoryview]:
    """The next `count` blocks, one after the other in the same memory."""
    block = memoryview(bytearray(block_bytes))
    for _ in range(count):
        receive_into(connection, [block])
        yield block
