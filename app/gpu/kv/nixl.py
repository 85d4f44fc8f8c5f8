"""KV of prompts by NIXL (github.com/ai-dynamo/nixl): the receiver reads the sender's host memory, by RDMA where there
is any. The connection that the servers have handed over carries the rest, in messages of a head and what it says:

    AGENT   bytes     the sender's metadata: how to reach its memory, before the first of it
    BYTES   bytes     what is not in its pool
    MEMORY  address   where in the pool the next bytes are

The receiver takes memory a window at a time. It sends a byte when it has read one, and gets one back if the sender has
held the memory until then. So a sender may let go whenever it likes: what is read later counts for nothing. And no
network writes to a block: a block that is given up may be another session's by then.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from torch import Tensor

from app.domain.errors import FieldOutOfRange
from app.gpu.kv.stream import SocketTransport, receive, receive_into, send_slices

WINDOW_BYTES = 4 << 20
"""Most of one read."""
POLL_S = 0.0001
"""Between two looks at a read that is under way."""
HEAD = struct.Struct("<BQQ")
"""Kind, length in bytes, address."""
AGENT, BYTES, MEMORY = range(3)
MAX_AGENT_BYTES = 1 << 20
TAKEN, HELD = b"t", b"h"


class NixlAgent:
    """This engine's part in NIXL. Any thread may use it."""

    def __init__(self, pool: Tensor | None) -> None:
        """Other agents may read `pool`, a contiguous tensor in host memory, once they have this one's metadata. None:
        it only reads. Raises `FieldOutOfRange` if NIXL does not start.
        """
        self._pool = pool
        self._first, self._end = (0, 0) if pool is None else (pool.data_ptr(), pool.data_ptr() + pool.nbytes)
        try:
            self._nixl: Any = _started()
            if pool is not None:
                self._nixl.register_memory([(self._first, pool.nbytes, 0, "")], "DRAM")
            self.metadata: bytes = self._nixl.get_agent_metadata()
            """What others need to read the pool."""
        except Exception as error:  # of the bindings, as below
            message = f"prefill_transport: NIXL does not start: {error}"
            raise FieldOutOfRange(message, param="prefill_transport") from error
        self._peers = Counter[str]()
        """How many connections there are to each agent."""
        self._stuck: list[tuple[Any, Window]] = []
        """Reads without a waiting caller."""
        self._changing = threading.Lock()

    def address_of(self, data: memoryview) -> int | None:
        """Where the bytes are in the pool; None if they are not in it."""
        address: int = np.frombuffer(data, np.uint8).ctypes.data if len(data) else 0
        return address if self._first <= address and address + len(data) <= self._end and len(data) else None

    def add_peer(self, metadata: bytes) -> str:
        """Another agent's name, whose pool can be read until `remove_peer`. Raises `ConnectionError`."""
        with self._changing, _as_connection_errors("cannot reach the other server"):
            name: str | bytes = self._nixl.add_remote_agent(metadata)
            found = name.decode() if isinstance(name, bytes) else name
            self._peers[found] += 1
        return found

    def remove_peer(self, name: str) -> None:
        """Forget another agent, unless there are more connections to it."""
        with self._changing:
            self._peers[name] -= 1
            if not self._peers[name]:
                del self._peers[name]
                with suppress(Exception):
                    self._nixl.remove_remote_agent(name)

    def progress(self) -> None:
        """Serve the reads of others, where those need this process. Raises `ConnectionError`."""
        with _as_connection_errors("does not go on"):
            self._nixl.get_new_notifs()

    def window(self) -> Window:
        """Memory that can be read to. Raises `ConnectionError`."""
        self._sweep()
        memory = np.empty(WINDOW_BYTES, np.uint8)
        with _as_connection_errors("has no memory to read to"):
            return Window(memory, self._nixl.register_memory([(memory.ctypes.data, WINDOW_BYTES, 0, "")], "DRAM"))

    def close(self, window: Window) -> None:
        """Let go of it, or do so later if a read to it is under way."""
        with self._changing:
            if all(each is not window for _, each in self._stuck):
                self._free(window)

    def read(self, window: Window, count: int, name: str, address: int, why_stop: Callable[[], str | None]) -> None:
        """Read `count` bytes at another agent's address into the window, until there is a reason to stop. Raises
        `ConnectionError` if they do not come.
        """
        with _as_connection_errors("cannot read from the other server"):
            here = self._nixl.get_xfer_descs([(window.memory.ctypes.data, count, 0)], "DRAM")
            there = self._nixl.get_xfer_descs([(address, count, 0)], "DRAM")
            handle = self._nixl.initialize_xfer("READ", here, there, name)
            state = self._nixl.transfer(handle)
        while state == "PROC":
            if (reason := why_stop()) is not None:
                with self._changing:
                    self._stuck.append((handle, window))
                raise ConnectionError(reason)
            time.sleep(POLL_S)
            state = self._state(handle)
        with suppress(Exception):
            handle.release()
        if state != "DONE":
            raise ConnectionError("the other server's memory cannot be read")

    def _state(self, handle: Any) -> str:
        """`PROC` while the read goes on. The bindings raise for most errors."""
        try:
            state: str = self._nixl.check_xfer_state(handle)
        except Exception:
            return "ERR"
        return state

    def _sweep(self) -> None:
        """Let go of windows whose reads have come to an end after all."""
        with self._changing:
            ended = [each for each in self._stuck if self._state(each[0]) != "PROC"]
            self._stuck = [each for each in self._stuck if each not in ended]
            for handle, window in ended:
                with suppress(Exception):
                    handle.release()
                self._free(window)

    def _free(self, window: Window) -> None:
        with suppress(Exception):
            self._nixl.deregister_memory(window.registered)


@contextmanager
def _as_connection_errors(what: str) -> Iterator[None]:
    """Errors of the bindings are of many types, none of which is an `OSError`."""
    try:
        yield
    except Exception as error:
        raise ConnectionError(f"NIXL {what}: {error}") from error


def _started() -> Any:
    """An agent of NIXL. Its log lines are off: they would have neither our form nor a replica's name."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raises = logging.raiseExceptions
    from nixl_cu12 import nixl_agent, nixl_agent_config  # only for those who ask for it
    from nixl_cu12 import nixl_thread_sync_t as sync

    logging.raiseExceptions = raises
    # A progress thread would take half a core for ever. Without, both ends go on while they wait for each other.
    config = nixl_agent_config(backends=["UCX"], sync_mode=sync.NIXL_THREAD_SYNC_STRICT, enable_prog_thread=False)
    return nixl_agent(f"djinn-{uuid4().hex}", config)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Memory that reads come to: `WINDOW_BYTES` uint8, and its registration."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    registered: Any


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
                send_slices(self._connection, data)
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
        return self._is_ready(select.POLLRDHUP)

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
        deadline = time.monotonic() + (self._connection.gettimeout() or 0)
        while not self._is_ready(select.POLLIN):
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
