"""KV of prompts by NIXL (github.com/ai-dynamo/nixl): the receiver reads the sender's host memory, by RDMA where there
is any. The connection that the servers have handed over carries the rest, in messages of a head and what it says:

    AGENT   bytes     the sender's metadata: how to reach its memory, before the first of it
    BYTES   bytes     what is not in its pool
    MEMORY  address   where in the pool the next bytes are

The receiver takes memory a window at a time. It sends a byte when it has read one, and gets one back if the sender has
held the memory until then. So a sender may let go whenever it likes: what is read later counts for nothing. And no
network writes to a block: one that is given up may be another session's by then.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
import time
from contextlib import AbstractContextManager

from app.gpu.kv.nixl_agent import POLL_S, WINDOW_BYTES, NixlAgent, Window
from app.gpu.kv.stream import receive, receive_into
from app.gpu.kv.transport import SocketTransport

HEAD = struct.Struct("<BQQ")
"""Kind, length in bytes, address."""
AGENT, BYTES, MEMORY = range(3)
MAX_AGENT_BYTES = 1 << 20
TAKEN, HELD = b"t", b"h"


class NixlTransport(SocketTransport):
    """One way to another server, which must be of this kind too."""

    def __init__(self, taken: AbstractContextManager[socket.socket], agent: NixlAgent) -> None:
        """Raises `OSError` if the connection does not come."""
        super().__init__(taken)
        self._agent = agent
        self._has_told = False
        self._is_over = threading.Event()
        self._peer = ""
        self._window: Window | None = None
        self._ready = memoryview(b"")
        """What has been read, and not taken yet."""
        self._left = 0
        """Of the message that is being taken."""
        self._address: int | None = None
        self._read_until = 0.0

    def send(self, data: memoryview) -> None:
        """Have it read, or send it if it is not in the pool. Raises `OSError`."""
        with self._in_use:
            address = self._agent.address_of(data)
            if address is None:
                self._connection.sendall(HEAD.pack(BYTES, len(data), 0))
                self._send(data)
                return
            if not self._has_told:
                metadata = self._agent.metadata
                self._connection.sendall(HEAD.pack(AGENT, len(metadata), 0) + metadata)
                self._has_told = True
            self._connection.sendall(HEAD.pack(MEMORY, len(data), address))
            for _ in range(0, len(data), WINDOW_BYTES):
                self._wait_until_taken()
                self._connection.sendall(HELD)

    def receive(self, target: memoryview) -> None:
        """Fill the target. Raises `OSError` if not enough comes."""
        with self._in_use:
            if self._is_over.is_set():
                raise ConnectionError("the connection to the other server has been given up")
            while target:
                if not self._ready:
                    self._ready = self._next()
                count = min(len(target), len(self._ready))
                target[:count] = self._ready[:count]
                target, self._ready = target[count:], self._ready[count:]

    def is_gone(self) -> bool:
        """Whether the other end has gone away. What it sends is for the waiting receiver."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLRDHUP)
        except ValueError:  # it is closed here
            return True
        return bool(poll.poll(0))

    def end(self) -> None:
        """Release it. Senders and receivers then fail."""
        self._is_over.set()
        super().end()
        if self._peer:
            self._agent.remove_peer(self._peer)
            self._peer = ""
        if self._window is not None:
            self._agent.close(self._window)
            self._window = None

    def _wait_until_taken(self) -> None:
        poll, deadline = select.poll(), time.monotonic() + (self._connection.gettimeout() or 0)
        poll.register(self._connection, select.POLLIN)
        while not poll.poll(0):
            if time.monotonic() > deadline:
                raise TimeoutError("the other server does not read what is sent to it")
            self._agent.progress()
            time.sleep(POLL_S)
        receive(self._connection, len(TAKEN))

    def _next(self) -> memoryview:
        """The next bytes, in the window."""
        while not self._left:
            kind, self._left, address = HEAD.unpack(receive(self._connection, HEAD.size))
            if kind not in (AGENT, BYTES, MEMORY):
                raise ConnectionError("the other server does not send prompts as this one does")
            self._address = address if kind == MEMORY else None
            if kind == AGENT:
                self._meet()
        if self._window is None:
            self._window = self._agent.window()
        count = min(self._left, WINDOW_BYTES)
        ready = self._window.memory.data[:count]
        if self._address is None:
            receive_into(self._connection, [ready])
        else:
            self._read_until = time.monotonic() + (self._connection.gettimeout() or 0)
            self._agent.read(self._window, count, self._peer, self._address, self._why_stop)
            self._connection.sendall(TAKEN)
            if receive(self._connection, len(HELD)) != HELD:
                raise ConnectionError("the other server did not confirm that it held its memory")
            self._address += count
        self._left -= count
        return ready

    def _meet(self) -> None:
        if self._peer or self._left > MAX_AGENT_BYTES:
            raise ConnectionError("the other server says too much of how to reach it")
        self._peer, self._left = self._agent.add_peer(receive(self._connection, self._left)), 0

    def _why_stop(self) -> str | None:
        """Why a read that is under way is waited for no longer."""
        if self._is_over.is_set():
            return "the receiver has dropped the prompt of this connection"
        if self.is_gone():
            return "the other server has gone away"
        if time.monotonic() > self._read_until:
            return "the other server's memory was not read in time"
        return None
