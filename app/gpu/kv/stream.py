"""KV on connections between the engines of two servers: whole sessions, and prompts that one computes for the other.

A session is sent at once, without a checksum: TCP has its own, and the two servers trust each other. What does not come
whole is worth nothing.

    header     as that of a file (`state/kv_header.py`), which says whose KV it is and how much
    token_ids  I32 [tokens]
    kv         block after block, as the pool holds them

The sender of a prompt has no blocks until it is computed. So they come in parts, and end when one of the two closes.
What has come by then is of use.

    lead    BLAKE2b of the model's identity, the layout of its KV, and the prompt's tokens
    blocks  one after the other, from the one on that the receiver has asked for, but for those behind the window of the
            prompt's end; zeros are behind the prompt
"""

from __future__ import annotations

import hashlib
import socket
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from app.gpu.kv.file import read_lead
from app.gpu.state.kv_header import KVFileHeader, KVFileMismatch, KVIdentity, encode_header
from app.gpu.state.moves import Move, Moved

SILENCE_S = 10.0
"""How long a connection may take for `SLICE_BYTES`, either way."""
SLICE_BYTES = 1 << 20
"""Sent at once, and waited for at once: a receiver that is woken for less takes turns with the sender."""
PATIENCE_S = 30.0
"""How long a receiver waits for the next bytes: the other server may have to compute a part of a prompt first."""
LEAD_BYTES = 32
"""Of a prompt."""


def send_kv(connection: socket.socket, header: KVFileHeader, parts: Sequence[memoryview]) -> int:
    """Send it all; returns how many bytes. `parts` are the header's blocks, neighbours joined. Raises `OSError`."""
    connection.settimeout(SILENCE_S)
    return _send(connection, encode_header(header) + array("i", header.token_ids).tobytes(), parts)


def _send(connection: socket.socket, lead: bytes, parts: Sequence[memoryview]) -> int:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(lead)
    for part in parts:
        for first in range(0, len(part), SLICE_BYTES):  # the time limit of `sendall` is for all that it is given
            connection.sendall(part[first : first + SLICE_BYTES])
    return len(lead) + sum(map(len, parts))


def receive_lead(connection: socket.socket, expected: KVIdentity, *, max_tokens: int) -> KVFileHeader:
    """The header with tokens; the blocks follow. Raises what `read_lead` does, `OSError`."""
    connection.settimeout(SILENCE_S)
    return read_lead(partial(receive, connection), expected, max_tokens)[0]


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


def send_prompt(connection: socket.socket, move: Move, parts: Sequence[memoryview], identity: KVIdentity) -> int:
    """Send a part of a prompt, with the lead before the first; returns how many bytes. `parts` are its blocks,
    neighbours joined. Raises `OSError`.
    """
    connection.settimeout(PATIENCE_S)
    return _send(connection, _lead(move, identity) if move.begins else b"", parts)


def receive_prompt(connection: socket.socket, move: Move, blocks: Iterable[memoryview], identity: KVIdentity) -> Moved:
    """Receive a prompt, as much of it as comes. Raises `KVFileMismatch`."""
    connection.settimeout(PATIENCE_S)
    layout, tokens = identity.layout, len(move.token_ids)
    end = layout.token_blocks(tokens, 0)
    places = [*layout.groups.held(list(range(move.first, end)), move.behind - move.first), end]
    computed = move.first // layout.groups.size * layout.block_size
    try:
        if receive(connection, LEAD_BYTES) != _lead(move, identity):
            raise KVFileMismatch("the other server has another model, or computes another prompt")
        for block, following in zip(blocks, places[1:], strict=True):
            receive_into(connection, [block])
            computed = min(following // layout.groups.size * layout.block_size, tokens)
    except OSError as error:
        return Moved(move.number, computed=computed, error=str(error))
    return Moved(move.number, computed=computed)


def _lead(move: Move, identity: KVIdentity) -> bytes:
    header = encode_header(KVFileHeader(identity, move.token_ids, len(move.token_ids)))
    return hashlib.blake2b(header + array("i", move.token_ids).tobytes(), digest_size=LEAD_BYTES).digest()
