"""KV of prompts on its way between servers.

    lead    BLAKE2b of the model's identity, the layout of its KV, and the prompt's tokens
    blocks  one after the other, as the pool holds them, from the one on that the receiver has asked for; zeros are
            behind the prompt in the last one

The sender has no blocks until the prompt is computed, so they come in parts, and end when one of the two closes. What
has come by then is of use.
"""

from __future__ import annotations

import hashlib
import threading
from array import array
from dataclasses import replace

from app.gpu.kv.file import zero_after
from app.gpu.kv.host_pool import HostPool
from app.gpu.kv.transport import OpenWay, Transport
from app.gpu.state.kv_header import KVFileHeader, KVFileMismatch, KVIdentity, encode_header
from app.gpu.state.moves import Move, Moved
from app.machine.handover import SocketTable

LEAD_BYTES = 32


class PromptStreams:
    """Ways to other servers, by the number of the connection. A worker sends or receives; the engine ends."""

    def __init__(self, host: HostPool, identity: KVIdentity, connections: SocketTable, open_way: OpenWay) -> None:
        self._open_way = open_way
        self._host = host
        self._identity = identity
        self._connections = connections
        self._open: dict[int, Transport] = {}
        self._taking = set[int]()
        """Those that a worker is about to open, and that are still wanted."""
        self._changing = threading.Lock()

    def send(self, move: Move) -> Moved:
        """Send a part of a prompt, with the lead before the first. Raises `OSError`."""
        way, is_new = self._take(move.connection)
        try:
            lead = memoryview(self._lead(move)) if is_new else memoryview(b"")
            spans = [lead, *self._host.spans(move.source)]
            if move.ends:
                spans[-1:] = self._without_rest(spans[-1], move)
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
        with self._changing:
            self._taking.discard(connection)
        if not self._close(connection):
            self._connections.discard(connection)

    def _close(self, connection: int) -> bool:
        """Whether it was open."""
        with self._changing:
            way = self._open.pop(connection, None)
        if way is not None:
            way.end()
        return way is not None

    def _take(self, connection: int) -> tuple[Transport, bool]:
        """The way, and whether nothing has passed over it yet."""
        with self._changing:
            known = self._open.get(connection)
            if known is not None:
                return known, False
            self._taking.add(connection)
        try:
            way = self._open_way(self._connections.take(connection))
        except BaseException:
            with self._changing:
                self._taking.discard(connection)
            raise
        with self._changing:
            is_wanted = connection in self._taking
            self._taking.discard(connection)
            if is_wanted:
                self._open[connection] = way
        if not is_wanted:
            way.end()
            raise ConnectionError("the receiver has dropped the prompt of this connection")
        return way, True

    def _without_rest(self, span: memoryview, move: Move) -> list[memoryview]:
        """The span whose last block is the prompt's last, with zeros for what is in that beyond the prompt."""
        layout = self._identity.layout
        used = len(move.token_ids) % layout.block_size
        if not used:
            return [span]
        last = zero_after(span[-layout.block_bytes :], used, layout)
        return [span[: -layout.block_bytes], memoryview(last)]

    def _lead(self, move: Move) -> bytes:
        header = encode_header(KVFileHeader(self._identity, move.token_ids, len(move.token_ids)))
        return hashlib.blake2b(header + array("i", move.token_ids).tobytes(), digest_size=LEAD_BYTES).digest()
