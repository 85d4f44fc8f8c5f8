"""Connected sockets on their way from one thread or process to another, which finds each by its number.

Each gets a higher number than those before it, and they come in this order.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator

WAIT_S = 5.0
"""How long a socket may come behind the command that names it: the two go different ways."""


class SocketTable:
    """Sockets not yet taken, and those in use. Any thread may use it."""

    def __init__(self) -> None:
        self._sockets: dict[int, socket.socket] = {}
        self._latest = -1
        """The highest number that has come: of those up to it, none comes any more."""
        self._unwanted = set[int]()
        """Those that are closed as they come."""
        self._used: dict[int, socket.socket] = {}
        self._closed = False
        self._came = threading.Condition()

    def put(self, number: int, connection: socket.socket) -> None:
        """Take in a socket."""
        with self._came:
            is_wanted = number not in self._unwanted
            self._latest = max(self._latest, number)
            self._unwanted = {later for later in self._unwanted if later > number}
            if is_wanted and not self._closed:
                self._sockets[number] = connection
            else:
                connection.close()
            self._came.notify_all()

    def discard(self, number: int) -> None:
        """Close the socket, even if it has not come yet: it is not needed. A thread that uses it learns that it has
        ended, and closes it.
        """
        with self._came:
            if (waiting := self._sockets.pop(number, None)) is not None:
                waiting.close()
            elif (used := self._used.pop(number, None)) is not None:
                _end(used)
            elif number > self._latest:
                self._unwanted.add(number)

    def is_ended(self, number: int) -> bool:
        """Whether the other end of a socket that is here has closed it. That end must not have sent anything."""
        with self._came:
            found = self._sockets.get(number) or self._used.get(number)
            if found is None:
                return False
            poll = select.poll()
            poll.register(found, select.POLLIN)
            return bool(poll.poll(0))

    @contextlib.contextmanager
    def take(self, number: int, wait_s: float = WAIT_S, *, keep: bool = False) -> Iterator[socket.socket]:
        """The socket; waits for it. In the end it is closed. With `keep` it can be taken again, unless an error has
        come or it has been discarded. Raises `OSError` if it does not come, or has gone: if it comes later, it is
        closed.
        """
        connection, is_kept = self._take(number, wait_s), False
        try:
            yield connection
            is_kept = keep
        finally:
            with self._came:
                is_wanted = self._used.pop(number, None) is not None and not self._closed
                if is_kept and is_wanted:
                    self._sockets[number] = connection
                else:
                    connection.close()

    def close(self) -> None:
        """Close those not taken, and all that come. Users of the others learn that they have ended."""
        with self._came:
            self._closed = True
            for connection in self._sockets.values():
                connection.close()
            self._sockets.clear()
            for connection in self._used.values():
                _end(connection)
            self._came.notify_all()

    def _take(self, number: int, wait_s: float) -> socket.socket:
        deadline = time.monotonic() + wait_s
        with self._came:
            while number not in self._sockets:
                left = deadline - time.monotonic()
                if number <= self._latest:
                    raise OSError("the connection to the other server has been given up")
                if left <= 0 or self._closed:
                    self._unwanted.add(number)
                    raise OSError("the connection to the other server has not come")
                self._came.wait(left)
            connection = self._sockets.pop(number)
            self._used[number] = connection
            return connection


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other end may have closed it
        connection.shutdown(socket.SHUT_RDWR)


def send_socket(way: socket.socket, number: int, connection: socket.socket) -> None:
    """Send the socket over one end of a pair of `SOCK_SEQPACKET`. The sender's own descriptor stays open.

    Raises `OSError` if the other end is gone, or reads nothing.
    """
    socket.send_fds(way, [number.to_bytes(8, "little")], [connection.fileno()])


def receive_sockets(way: socket.socket, table: SocketTable) -> None:
    """Put what `send_socket` sends at the other end into the table, until that end is closed."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(way, 8, 1)
        if not data:
            return
        for descriptor in descriptors:
            table.put(int.from_bytes(data, "little"), socket.socket(fileno=descriptor))
