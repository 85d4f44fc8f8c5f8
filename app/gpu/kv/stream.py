"""KV on connections between the engines of two servers: whole sessions, and prompts that one computes for the other.

A session is sent at once, without a checksum: TCP has its own, and the two servers trust each other. What does not come
whole is worth nothing.

    header     as that of a file (`state/kv_header.py`), which says whose KV it is and how much
    token_ids  I32 [tokens]
    kv         block after block, as the pool holds them

The sender of a prompt has no blocks until it is computed. So they come in parts, and end when one of the two closes.
What has come by then is of use. They go any way on which bytes come in the order of their sending.

    lead    BLAKE2b of the model's identity, the layout of its KV, and the prompt's tokens
    blocks  one after the other, from the one on that the receiver has asked for; zeros are behind the prompt in the
            last one
"""

from __future__ import annotations

import contextlib
import hashlib
import select
import socket
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from app.gpu.kv.file import MAX_HEADER_BYTES, zero_after
from app.gpu.state.kv_header import (
    LENGTH_BYTES,
    TOKEN_BYTES,
    KVFileDamaged,
    KVFileHeader,
    KVFileMismatch,
    KVIdentity,
    KVLayout,
    check_tokens,
    encode_header,
    read_header,
)
from app.gpu.state.moves import Move, Moved
from app.machine.handover import SocketTable

if TYPE_CHECKING:
    from app.gpu.kv.pools import HostPool

SILENCE_S = 10.0
"""How long a connection may take for `SLICE_BYTES`, either way."""
SLICE_BYTES = 1 << 20
"""Sent at once, and waited for at once: a receiver that is woken for less takes turns with the sender."""
PATIENCE_S = 30.0
"""How long a receiver waits for the next bytes: the other server may have to compute a part of a prompt first."""
LEAD_BYTES = 32
"""Of a prompt."""


def send_kv(connection: socket.socket, header: KVFileHeader, spans: Sequence[memoryview]) -> int:
    """Send it all; returns how many bytes. `spans` are the header's blocks, neighbours joined.

    What is in the last block beyond the computed tokens is sent as zeros. Raises `OSError`.
    """
    connection.settimeout(SILENCE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    lead = encode_header(header) + array("i", header.token_ids).tobytes()
    connection.sendall(lead)
    parts = [*spans[:-1], *_without_rest(spans[-1], header.computed_tokens, header.identity.layout)] if spans else []
    for part in parts:
        send_slices(connection, part)
    return len(lead) + sum(map(len, parts))


def _without_rest(span: memoryview, tokens: int, layout: KVLayout) -> list[memoryview]:
    """The span whose last block is the last of so many tokens, with zeros for what is in that beyond them."""
    used = tokens % layout.block_size
    if not used:
        return [span]
    last = zero_after(span[-layout.block_bytes :], used, layout)
    return [span[: -layout.block_bytes], memoryview(last)]


def send_slices(connection: socket.socket, data: memoryview) -> None:
    """The time limit of `sendall` is for all that it is given."""
    for first in range(0, len(data), SLICE_BYTES):
        connection.sendall(data[first : first + SLICE_BYTES])


def receive_lead(connection: socket.socket, expected: KVIdentity, *, max_tokens: int) -> KVFileHeader:
    """The header with tokens, of which there may be `max_tokens`; the blocks follow.

    Raises any `KVFileError` if it is not of the `expected` model and layout, `OSError`.
    """
    connection.settimeout(SILENCE_S)
    start = receive(connection, LENGTH_BYTES)
    header_bytes = int.from_bytes(start, "little")
    if not 0 < header_bytes <= MAX_HEADER_BYTES:
        raise KVFileDamaged("it does not begin with the length of its header")
    header = read_header(start + receive(connection, header_bytes), expected, max_tokens)
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


class SocketTransport:
    """One way to another server: a connection that the two have handed to their engines. One thread at a time sends or
    receives; any may ask or end.
    """

    def __init__(self, taken: AbstractContextManager[socket.socket]) -> None:
        """Raises `OSError` if the connection does not come."""
        self._taken = contextlib.ExitStack()
        connection = self._taken.enter_context(taken)
        connection.settimeout(PATIENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection = connection
        self._in_use = threading.Lock()

    def send(self, data: memoryview) -> None:
        """Send it all. Raises `OSError`."""
        with self._in_use:
            send_slices(self._connection, data)

    def receive(self, target: memoryview) -> None:
        """Fill the target. Raises `OSError` if not enough comes."""
        with self._in_use:
            receive_into(self._connection, [target])

    def is_gone(self) -> bool:
        """Whether the receiver has gone away: it sends nothing, so there is only its end to read."""
        return self._is_ready(select.POLLIN)

    def _is_ready(self, events: int) -> bool:
        """Whether any of the `select.poll` events has come, or the connection is closed here."""
        poll = select.poll()
        try:
            poll.register(self._connection, events)
        except ValueError:
            return True
        return bool(poll.poll(0))

    def end(self) -> None:
        """Release it. Senders and receivers then fail."""
        with contextlib.suppress(OSError):  # the other end may have gone before
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._in_use:  # a thread that still reads would read from a later connection with the same number
            self._taken.close()


OpenWay = Callable[[AbstractContextManager[socket.socket]], SocketTransport]
"""Makes a way of a connection. Raises `OSError` if the connection does not come."""


class PromptStreams:
    """Ways to other servers, by the number of the connection. A worker sends or receives; the engine ends."""

    def __init__(self, host: HostPool, identity: KVIdentity, connections: SocketTable, open_way: OpenWay) -> None:
        self._open_way = open_way
        self._host = host
        self._identity = identity
        self._connections = connections
        self._open: dict[int, SocketTransport | None] = {}
        """None: a worker is about to open it."""
        self._changing = threading.Lock()

    def send(self, move: Move) -> Moved:
        """Send a part of a prompt, with the lead before the first. Raises `OSError`."""
        way, is_new = self._take(move.connection)
        try:
            lead = memoryview(self._lead(move)) if is_new else memoryview(b"")
            spans = [lead, *self._host.spans(move.source)]
            if move.ends:
                spans[-1:] = _without_rest(spans[-1], len(move.token_ids), self._identity.layout)
            for span in spans:
                way.send(span)
        except OSError:
            self._close(move.connection)
            raise
        if move.ends:
            self._close(move.connection)
        return Moved(move.number, sent_bytes=sum(map(len, spans)))

    def receive(self, move: Move) -> Moved:
        """Receive a prompt, as much of it as comes. Raises `OSError` if none does, `KVFileMismatch`."""
        way, _ = self._take(move.connection)
        size, count = self._identity.layout.block_size, len(move.token_ids)
        came = Moved(move.number, computed=move.first * size)
        try:
            lead = bytearray(LEAD_BYTES)
            way.receive(memoryview(lead))
            if lead != self._lead(move):
                raise KVFileMismatch("the other server has another model, or computes another prompt")
            for block in self._host.views(move.target):
                way.receive(block)
                came = replace(came, computed=min(came.computed + size, count))
        except OSError as error:
            came = replace(came, error=str(error))
        finally:
            self._close(move.connection)
        return came

    def is_gone(self, connection: int) -> bool:
        """Whether the receiver has gone away, as far as anything has been sent."""
        with self._changing:
            way = self._open.get(connection)
        return way is not None and way.is_gone()

    def end(self, connection: int) -> None:
        """Let go of a connection, wherever it is. For the engine."""
        if not self._close(connection):
            self._connections.discard(connection)

    def _close(self, connection: int) -> bool:
        """Whether it was open."""
        with self._changing:
            way = self._open.pop(connection, None)
        if way is not None:
            way.end()
        return way is not None

    def _take(self, connection: int) -> tuple[SocketTransport, bool]:
        """The way, and whether nothing has passed over it yet."""
        with self._changing:
            known = self._open.setdefault(connection, None)
        if known is not None:
            return known, False
        try:
            way = self._open_way(self._connections.take(connection))
        except BaseException:
            self._close(connection)
            raise
        with self._changing:
            is_wanted = connection in self._open
            if is_wanted:
                self._open[connection] = way
        if not is_wanted:
            way.end()
            raise ConnectionError("the receiver has dropped the prompt of this connection")
        return way, True

    def _lead(self, move: Move) -> bytes:
        header = encode_header(KVFileHeader(self._identity, move.token_ids, len(move.token_ids)))
        return hashlib.blake2b(header + array("i", move.token_ids).tobytes(), digest_size=LEAD_BYTES).digest()
