"""Frames over one end of a socket pair. Sending never waits, so neither process can hold up the other.

Large frames are in memory that both processes have, so that tokens of all sessions do not wait for the captures of one:
only a descriptor of it passes the socket.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
import select
import socket
import struct
import sys
import tempfile
import threading
import time
from array import array
from collections import deque
from collections.abc import Iterable

logger = logging.getLogger(__name__)

HEADER = struct.Struct("<QB")
"""Before each frame: how many bytes it has, and where they are."""
BEHIND, SHARED = range(2)
"""Behind the header; in a file in memory, whose descriptor comes with the header."""
SHARED_BYTES = 1 << 16
"""A longer frame is shared."""
BUFFER_BYTES = 1 << 20
"""Of the socket, each way: the events of many steps."""
READ_BYTES = 1 << 18
MOST_DESCRIPTORS = 16
"""In one read: Linux gives those of one header at a time."""
SLICE_S = 0.5
PAUSE_S = 0.01
"""Until what no event tells of is looked at again: whether descriptors are free."""
LOOK = socket.MSG_PEEK if sys.platform == "linux" else 0
"""A descriptor for which this process has no room is lost to it once it is read. Linux gives descriptors to who only
looks, so what comes is read when they have been taken.
"""

Waiting = tuple[memoryview, int | None]
"""What is to be written, and the descriptor that goes with it."""


class Closed(Exception):
    """The other process has closed its end, or has ended."""


class Channel:
    """`send` and `close` may be called from any thread, `receive` from one."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            end.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        self._socket = end
        self._begun: Waiting | None = None
        """What is written next, or the rest of it."""
        self._waiting: deque[Waiting] = deque()
        """Frames that have not been begun yet, in order."""
        self._writing = threading.Lock()
        self._is_full = threading.Event()
        """Whether frames wait for room in the socket."""
        self._has_too_many = False
        """Whether the other process has yet to take so many descriptors that the system lets no more be sent."""
        self._closed = threading.Event()
        self._read = bytearray()
        self._descriptors: deque[int] = deque()
        """Those that have come, in the order of their headers."""
        self._spares: list[int] = []
        """One, whose closing makes room for one that comes when the process has as many as it may have."""
        self._keep_spare()
        threading.Thread(target=self._write_when_there_is_room, name="djinn-frames", daemon=True).start()

    def send(self, *parts: bytes | memoryview) -> None:
        """Send one frame. The parts of a large frame are written one by one, without a copy. If the other end is gone,
        the frame is lost, and `receive` raises `Closed`.
        """
        length = sum(map(len, parts))
        shared = _share(parts) if length > SHARED_BYTES else None
        header = HEADER.pack(length, BEHIND if shared is None else SHARED)
        self._waiting.append((memoryview(b"".join((header, *parts)) if shared is None else header), shared))
        self._flush()

    def receive(self, timeout_s: float) -> bytes | memoryview | None:
        """The next frame; None if there is none in time. Raises `Closed`. A view keeps shared memory."""
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        while (frame := self._take()) is None:
            left = deadline - time.monotonic()
            if not (poll.poll(max(0.0, left) * 1000) and self._fill()) and left <= 0:
                return None
        self._keep_spare()
        return frame

    def close(self) -> None:
        """Close this end; the other finds its own closed. What still waits to be written is lost."""
        self._closed.set()
        self._is_full.set()
        self._socket.close()
        with self._writing:
            self._drop()
        while _close_last(self._descriptors) or _close_last(self._spares):
            pass

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
        return self._begun is not None or bool(self._waiting)

    def _fill(self) -> bool:
        """Whether anything has been read."""
        try:
            # Not by `recv_fds`: it ignores flags.
            flags = LOOK | getattr(socket, "MSG_CMSG_CLOEXEC", 0)
            room = socket.CMSG_LEN(MOST_DESCRIPTORS * array("i").itemsize)
            found, beside, told, _ = self._socket.recvmsg(READ_BYTES, room, flags)
            if LOOK and told & socket.MSG_CTRUNC:  # no room for a descriptor
                if not _close_last(self._spares):
                    self._closed.wait(PAUSE_S)
                return False
            self._descriptors += [each for _, _, data in beside for each in array("i", data)]
            if LOOK and found:
                self._socket.recv(len(found))
        except BlockingIOError:
            return False
        except OSError:
            found = b""
        if not found:
            raise Closed
        self._read += found
        return True

    def _keep_spare(self) -> None:
        if not self._spares and not self._closed.is_set():
            with contextlib.suppress(OSError):
                self._spares.append(os.open(os.devnull, os.O_RDONLY))

    def _take(self) -> bytes | memoryview | None:
        """The next frame of what has been read; None if none is whole."""
        if len(self._read) < HEADER.size:
            return None
        length, place = HEADER.unpack_from(self._read)
        end = HEADER.size + (length if place == BEHIND else 0)
        if len(self._read) < end:
            return None
        with memoryview(self._read) as read:
            frame = bytes(read[HEADER.size : end])
        del self._read[:end]
        if place == BEHIND:
            return frame
        try:
            descriptor = self._descriptors.popleft()
        except IndexError:  # elsewhere than on Linux it is lost if there was no room; or `close` has closed it
            raise Closed from None
        return _map(descriptor, length)

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
        self._has_too_many = False
        while (begun := self._next()) is not None:
            data, shared = begun
            try:
                count = self._socket.send(data) if shared is None else socket.send_fds(self._socket, [data], [shared])
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno == errno.ETOOMANYREFS:
                    self._has_too_many = True
                    return False
                self._drop()
                return True
            self._begun = (data[count:], None) if count < len(data) else None
            if shared is not None:
                os.close(shared)
        return True

    def _next(self) -> Waiting | None:
        if self._begun is None and self._waiting:
            # What is begun is so before it is taken out: `drain` must never find nothing.
            self._begun = self._waiting[0]
            self._waiting.popleft()
        return self._begun

    def _drop(self) -> None:
        """Forget what waits: nobody reads it."""
        while (begun := self._next()) is not None:
            self._begun = None
            if begun[1] is not None:
                os.close(begun[1])

    def _write_when_there_is_room(self) -> None:
        while self._is_full.wait() and not self._closed.is_set():
            if self._has_too_many:  # there is room, of which the socket would tell at once
                self._closed.wait(PAUSE_S)
            else:
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


def _share(parts: Iterable[bytes | memoryview]) -> int | None:
    """A descriptor of a file in memory with all parts. None if none can be made: the socket takes the frame then."""
    try:
        descriptor = os.memfd_create("djinn-frame") if hasattr(os, "memfd_create") else _unnamed_file()
    except OSError:
        return None
    try:
        for part in parts:
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(descriptor, rest) :]
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def _unnamed_file() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _close_last(descriptors: deque[int] | list[int]) -> bool:
    """Whether there was one."""
    with contextlib.suppress(IndexError):  # another thread may just have taken it
        os.close(descriptors.pop())
        return True
    return False


def _map(descriptor: int, length: int) -> memoryview:
    try:
        return memoryview(mmap.mmap(descriptor, length, access=mmap.ACCESS_READ))
    except OSError:  # it takes one more descriptor, and there may be none
        with open(descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return memoryview(file.read())
    finally:
        os.close(descriptor)
