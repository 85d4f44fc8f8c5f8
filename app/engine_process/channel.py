"""Frames over one end of a socket pair. Sending never waits, so neither process can hold up the other.

Large frames go in parts, between which others pass: tokens of all sessions do not wait for the captures of one.
"""

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

HEADER = struct.Struct("<QB")
"""Before each part of a frame: how many bytes the part has, and what it is."""
WHOLE, PART, LAST_PART = range(3)
"""A frame that is no large one, a part of a large one, and the last of these."""
PART_BYTES = 1 << 16
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
        self._begun: memoryview | None = None
        """The rest of a part that has been written in part."""
        self._waiting: deque[memoryview] = deque()
        """Frames that have not been written yet, in order."""
        self._large: deque[memoryview] = deque()
        """The same of large ones: each is what is left of it."""
        self._writing = threading.Lock()
        self._is_full = threading.Event()
        """Whether frames wait for room in the socket."""
        self._closed = threading.Event()
        self._read = bytearray()
        self._parts = bytearray()
        """Of a large frame: what there is of it."""
        threading.Thread(target=self._write_when_there_is_room, name="djinn-frames", daemon=True).start()

    def send(self, data: bytes, *, may_be_late: bool = False) -> None:
        """Send one frame. If the other end is gone, it goes nowhere: `receive` tells of that. One that `may_be_late`
        arrives behind others that are sent after it, if it is large.
        """
        if may_be_late and len(data) > PART_BYTES:
            self._large.append(memoryview(data))
        else:
            self._waiting.append(memoryview(HEADER.pack(len(data), WHOLE) + data))
        self._flush()

    def receive(self, timeout_s: float) -> bytes | bytearray | None:
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
        while self._is_behind and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def _is_behind(self) -> bool:
        """Whether anything waits to be written."""
        return self._begun is not None or bool(self._waiting or self._large)

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

    def _take(self) -> bytes | bytearray | None:
        """The next frame of what has been read; None if none is whole."""
        while len(self._read) >= HEADER.size:
            length, kind = HEADER.unpack_from(self._read)
            end = HEADER.size + length
            if len(self._read) < end:
                return None
            with memoryview(self._read) as read:
                part = bytes(read[HEADER.size : end])
            del self._read[:end]
            if kind == WHOLE:
                return part
            self._parts += part
            if kind == LAST_PART:
                frame, self._parts = self._parts, bytearray()
                return frame
        return None

    def _flush(self, *, in_turn: bool = False) -> None:
        """Write what waits, as far as there is room, unless another thread does: it then takes this thread's frame.
        With `in_turn`, wait for that thread instead: it may have found no room just before there was some.
        """
        while self._is_behind and self._writing.acquire(blocking=in_turn):
            try:
                if not self._write():
                    self._is_full.set()
                    return
            finally:
                self._writing.release()

    def _write(self) -> bool:
        """Whether all has been written."""
        while (part := self._next_part()) is not None:
            try:
                count = self._socket.send(part)
            except BlockingIOError:
                return False
            except OSError:
                self._begun = None
                self._waiting.clear()
                self._large.clear()
                return True
            self._begun = part[count:] if count < len(part) else None
        return True

    def _next_part(self) -> memoryview | None:
        """What is written next: a large frame's parts only while nothing else waits."""
        # What is begun is so before it is taken out: `drain` must never find nothing.
        if self._begun is None and self._waiting:
            self._begun = self._waiting[0]
            self._waiting.popleft()
        elif self._begun is None and self._large:
            frame = self._large[0]
            part, rest = frame[:PART_BYTES], frame[PART_BYTES:]
            self._begun = memoryview(HEADER.pack(len(part), PART if rest else LAST_PART) + bytes(part))
            if rest:
                self._large[0] = rest
            else:
                self._large.popleft()
        return self._begun

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
