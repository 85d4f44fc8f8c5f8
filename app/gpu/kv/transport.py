"""How KV of a prompt goes from one engine to another: any way on which bytes come in the order of their sending."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from app.gpu.kv.stream import SLICE_BYTES, receive_into

PATIENCE_S = 30.0
"""How long a receiver waits for the next bytes: the other server may have to compute a part of a prompt first."""


class Transport(Protocol):
    """One way to another server. One thread at a time sends or receives; any may ask or end."""

    def send(self, data: memoryview) -> None:
        """Send it all. Raises `OSError`."""
        ...

    def receive(self, target: memoryview) -> None:
        """Fill the target. Raises `OSError` if not enough comes."""
        ...

    def is_gone(self) -> bool:
        """Whether the receiver has gone away. For the sender."""
        ...

    def end(self) -> None:
        """Release it. Senders and receivers then fail."""
        ...


OpenWay = Callable[[AbstractContextManager[socket.socket]], Transport]
"""Makes one of a connection that the two servers have handed to their engines. Raises `OSError` if it does not come."""


class Ways(Protocol):
    """All ways to other servers, by the number that commands know each by."""

    def is_gone(self, connection: int) -> bool:
        """Whether the receiver has gone away, as far as anything has been sent."""
        ...

    def end(self, connection: int) -> None:
        """Let go of it, wherever it is."""
        ...


class SocketTransport:
    """A connection that the two servers have handed to their engines."""

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
            self._send(data)

    def receive(self, target: memoryview) -> None:
        """Fill the target. Raises `OSError` if not enough comes."""
        with self._in_use:
            receive_into(self._connection, [target])

    def is_gone(self) -> bool:
        """Whether the receiver has gone away: it sends nothing, so there is only its end to read."""
        poll = select.poll()
        try:
            poll.register(self._connection, select.POLLIN)
        except ValueError:  # it is closed here
            return True
        return bool(poll.poll(0))

    def end(self) -> None:
        """Release it. Senders and receivers then fail."""
        with contextlib.suppress(OSError):  # the other end may have gone before
            self._connection.shutdown(socket.SHUT_RDWR)
        with self._in_use:  # only now nobody can read from another's connection with the same number
            self._taken.close()

    def _send(self, data: memoryview) -> None:
        for first in range(0, len(data), SLICE_BYTES):  # the time limit of `sendall` is for all that it is given
            self._connection.sendall(data[first : first + SLICE_BYTES])
