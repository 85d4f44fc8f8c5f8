"""This process's part in NIXL (github.com/ai-dynamo/nixl): memory that others may read, and reads of theirs."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import numpy as np
from torch import Tensor

from app.domain.errors import FieldOutOfRange

WINDOW_BYTES = 4 << 20
"""Most of one read."""
POLL_S = 0.0001
"""Between two looks at a read that is under way."""


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
    """An agent of NIXL. It writes no lines of its own, which would have neither our form nor a replica's name."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    raises = logging.raiseExceptions
    from nixl_cu12 import nixl_agent, nixl_agent_config  # only for those who ask for it
    from nixl_cu12 import nixl_thread_sync_t as sync

    logging.raiseExceptions = raises
    # A thread of its own would take half a core for ever. Without, both ends go on while they wait for each other.
    config = nixl_agent_config(backends=["UCX"], sync_mode=sync.NIXL_THREAD_SYNC_STRICT, enable_prog_thread=False)
    return nixl_agent(f"djinn-{uuid4().hex}", config)


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Memory that reads come to: `WINDOW_BYTES` uint8, and its registration."""

    memory: np.ndarray[Any, np.dtype[np.uint8]]
    registered: Any
