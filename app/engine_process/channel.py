"""Frames over one end of a socket pair. Sending never waits, so neither process can hold up the other."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import struct
import threading
import time
from collections import deque

logger = logging.getLogger(__name__)

LENGTH = struct.Struct("<Q")
"""Before each frame: how many bytes it has."""
BUFFER_BYTES = 1 << 20
"""Of the socket, each way: the events of many steps."""
READ_BYTES = 1 << 18
SLICE_S = 0.5


class Closed(Exception):
    """The other process has closed its end, or has ended."""


class Channel:
    """`send` and `close` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._socket = end
        self._waiting: deque[memoryview] = deque()
        """What has not been written yet, in order."""
        self._writing = threading.Lock()
        self._is_full = threading.Event()
        """Whether frames wait for room in the socket."""
        self._closed = threading.Event()
        self._read = bytearray()
        threading.Thread(target=self._write_when_there_is_room, name="djinn-frames", daemon=True).start()

    def send(self, data: bytes) -> None:
        """Send one frame. If the other end is gone, it goes nowhere: `receive` tells of that."""
        self._waiting.append(memoryview(LENGTH.pack(len(data)) + data))
        self._flush()

    def receive(self, timeout_s: float) -> bytes | None:
        """The next frame; None if there is none in time. Raises `Closed`."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (frame := self._take()) is None:
            left = deadline - time.monotonic()
            if not poll.poll(max(0.0, left) * 1000) and left <= 0:
                return None
            self._fill()
        return frame

    def close(self) -> None:
        """Close this end; the other finds its own closed. What still waits to be written is lost."""
        self._closed.set()
        self._is_full.set()
        self._socket.close()

    def wait_until_closed(self) -> None:
        """Wait until the other process has closed its end, or has ended. Reads nothing; any thread may call it."""
        self._wait_for(0, None)

    def drain(self, timeout_s: float) -> None:
        """Wait until all frames have been written."""
        deadline = time.monotonic() + timeout_s
        while self._waiting and time.monotonic() < deadline:
            time.sleep(0.001)

    def _fill(self) -> None:
        try:
            found = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            found = b""
        if not found:
            raise Closed
        self._read += found

    def _take(self) -> bytes | None:
        if len(self._read) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._read)
        end = LENGTH.size + length
        if len(self._read) < end:
            return None
        frame = bytes(memoryview(self._read)[LENGTH.size : end])
        del self._read[:end]
        return frame

    def _flush(self, *, in_turn: bool = False) -> None:
        """Write what waits, as far as there is room, unless another thread does: it then takes this thread's frame.
        With `in_turn`, wait for that thread instead: it may have found no room just before there was some.
        """
        while self._waiting and self._writing.acquire(blocking=in_turn):
            try:
                if not self._write():
                    self._is_full.set()
                    return
            finally:
                self._writing.release()

    def _write(self) -> bool:
        """Whether all has been written."""
        while self._waiting:
            try:
                count = self._socket.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError:
                self._waiting.clear()
                return True
            if count == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][count:]
        return True

    def _write_when_there_is_room(self) -> None:
        while self._is_full.wait() and not self._closed.is_set():
            self._wait_for(select.POLLOUT, SLICE_S)
            self._is_full.clear()
            if self._closed.is_set():  # what `close` has set may just have been cleared
                return
            self._flush(in_turn=True)

    def _wait_for(self, event: int, timeout_s: float | None) -> None:
        """Wait for an event of the socket, or the end of the other's. None: without end."""
        poll = select.poll()
        with contextlib.suppress(ValueError):  # closed meanwhile
            poll.register(self._socket, event)
            poll.poll(None if timeout_s is None else timeout_s * 1000)
