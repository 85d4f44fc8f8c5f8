"""KV of prompts by NIXL (github.com/ai-dynamo/nixl): the receiver reads the sender's host memory, by RDMA where there
is any. The connection that the servers have handed over carries the rest, in messages of a head and what it says:

    AGENT   bytes     how to reach the sender's memory, before the first of it
    BYTES   bytes     what is not in its pool
    MEMORY  address   where in the pool the next bytes are

The receiver takes memory a window at a time. It sends a byte when it has read one, and gets one back if the sender has
held the memory until then. So a sender may let go whenever it likes: what is read later counts for nothing. And no
network writes to a block: one that is given up may be another session's by then.
"""

from __future__ import annotations

import logging
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from torch import Tensor

from app.gpu.kv.stream import receive, receive_into
from app.gpu.kv.transport import SocketTransport

HEAD = struct.Struct("<BQQ")
"""Kind, length in bytes, address."""
AGENT, BYTES, MEMORY = range(3)
MAX_AGENT_BYTES = 1 << 20
WINDOW_BYTES = 4 << 20
"""Read at once: each window costs a message there and one back."""
POLL_S = 0.0001
"""Between two looks at a read that is under way."""
TAKEN, HELD = b"t", b"h"


class NixlAgent:
    """This engine's part in NIXL. Any thread may use it."""

    def __init__(self, pool: Tensor) -> None:
        """Other agents may read `pool`, a contiguous tensor in host memory, once they have been told of this one."""
        from nixl_cu12 import nixl_agent, nixl_agent_config  # only for those who ask for it
        from nixl_cu12 import nixl_thread_sync_t as sync

        _log_as_we_do()
        # A thread of its own would take half a core for ever. Without, both ends go on while they wait for each other.
        config = nixl_agent_config(backends=["UCX"], sync_mode=sync.NIXL_THREAD_SYNC_STRICT, enable_prog_thread=False)
        self._nixl: Any = nixl_agent(f"djinn-{uuid4().hex}", config)
        self._first, self._bytes = pool.data_ptr(), pool.nbytes
        self._nixl.register_memory([(self._first, self._bytes, 0, "")], "DRAM")
        self.told: bytes = self._nixl.get_agent_metadata()
        """What others need to read the pool."""
        self._stuck: list[tuple[Any, Window]] = []
        self._changing = threading.Lock()

    def open(self, taken: AbstractContextManager[socket.socket]) -> NixlTransport:
        """A way over a connection to another server. Raises `OSError` if the connection does not come."""
        return NixlTransport(taken, self)

    def address_of(self, data: memoryview) -> int | None:
        """Where the bytes are in the pool; None if they are not in it."""
        address: int = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        return address if self._first <= address < self._first + self._bytes else None

    def meet(self, told: bytes) -> str:
        """Another agent's name, after which its pool can be read. Raises `ConnectionError`."""
        try:
            name: str | bytes = self._nixl.add_remote_agent(told)
        except Exception as error:  # of the bindings, for whatever another server sends
            raise ConnectionError(f"NIXL cannot reach the other server: {error}") from error
        return name.decode() if isinstance(name, bytes) else name

    def progress(self) -> None:
        """Answer what others want to read, where that takes this process."""
        self._nixl.get_new_notifs()

    def window(self) -> Window:
        """Memory that can be read to."""
        self._sweep()
        memory = np.empty(WINDOW_BYTES, np.uint8)
        return Window(memory, self._nixl.register_memory([(memory.ctypes.data, WINDOW_BYTES, 0, "")], "DRAM"))

    def close(self, window: Window) -> None:
        """Let go of it, or do so later if a read to it is under way."""
        with self._changing:
            if all(each is not window for _, each in self._stuck):
                self._nixl.deregister_memory(window.registered)

    def read(self, window: Window, count: int, name: str, address: int, goes_on: Callable[[], bool]) -> None:
        """Read `count` bytes at another agent's address into the window, as long as it `goes_on`. Raises
        `ConnectionError` if they do not come.
        """
        here = self._nixl.get_xfer_descs([(window.memory.ctypes.data, count, 0)], "DRAM")
        there = self._nixl.get_xfer_descs([(address, count, 0)], "DRAM")
        try:
            handle = self._nixl.initialize_xfer("READ", here, there, name)
            state = self._nixl.transfer(handle)
        except Exception as error:  # of the bindings: the address is not the other agent's, or it is gone
            raise ConnectionError(f"NIXL cannot read from the other server: {error}") from error
        while state == "PROC":
            if not goes_on():
                with self._changing:
                    self._stuck.append((handle, window))
                raise ConnectionError("the other server's memory was not read in time")
            time.sleep(POLL_S)
            state = self._nixl.check_xfer_state(handle)
        handle.release()
        if state != "DONE":
            raise ConnectionError("the other server's memory cannot be read")

    def _sweep(self) -> None:
        """Let go of windows whose reads have come to an end after all."""
        with self._changing:
            ended = [each for each in self._stuck if self._nixl.check_xfer_state(each[0]) != "PROC"]
            self._stuck = [each for each in self._stuck if each not in ended]
            for handle, window in ended:
                handle.release()
                self._nixl.deregister_memory(window.registered)


def _log_as_we_do() -> None:
    """NIXL's own handler would write to standard output."""
    logger = logging.getLogger("nixl")
    logger.handlers.clear()
    logger.propagate = True
    logger.setLevel(logging.WARNING)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Memory that reads come to: `WINDOW_BYTES` uint8, and its registration."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    registered: Any


class NixlTransport(SocketTransport):
    """One way to another server, which must be of this kind too."""

    def __init__(self, taken: AbstractContextManager[socket.socket], agent: NixlAgent) -> None:
        super().__init__(taken)
        self._agent = agent
        self._has_told = False
        self._is_over = threading.Event()
        self._peer = ""
        self._window: Window | None = None
        self._ready = memoryview(b"")
        """What has been read, and nobody has taken."""
        self._left = 0
        """Of the message that is being taken."""
        self._address: int | None = None

    def send(self, data: memoryview) -> None:
        """Have it read, or send it if it is not in the pool. Raises `OSError`."""
        with self._in_use:
            address = self._agent.address_of(data)
            if address is None:
                self._connection.sendall(HEAD.pack(BYTES, len(data), 0))
                self._send(data)
                return
            if not self._has_told:
                self._connection.sendall(HEAD.pack(AGENT, len(self._agent.told), 0) + self._agent.told)
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
        """Whether the other end has gone away. What it sends is for whoever waits for it."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLRDHUP)
        except ValueError:  # it is closed here
            return True
        return bool(poll.poll(0))

    def end(self) -> None:
        """Let go of it. Whoever sends or receives fails."""
        self._is_over.set()
        super().end()
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
            deadline = time.monotonic() + (self._connection.gettimeout() or 0)
            self._agent.read(
                self._window,
                count,
                self._peer,
                self._address,
                lambda: not self._is_over.is_set() and not self.is_gone() and time.monotonic() < deadline,
            )
            self._connection.sendall(TAKEN)
            if receive(self._connection, len(HELD)) != HELD:
                raise ConnectionError("the other server does not say that it has held its memory")
            self._address += count
        self._left -= count
        return ready

    def _meet(self) -> None:
        if self._left > MAX_AGENT_BYTES:
            raise ConnectionError("the other server says too much of how to reach it")
        self._peer, self._left = self._agent.meet(receive(self._connection, self._left)), 0
