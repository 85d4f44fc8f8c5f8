"""Connections whose last answer is sent. A client that still sends would lose the answer if they closed at once: the
kernel resets a connection that is closed with something unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import dataclass

LINGER_S = 1.0
"""How long a connection stays for its client to read the answer and close it."""
MOST = 32
"""Connections that stay at once. One more, and the first of them is closed."""
READ_BYTES = 64 << 10
DROPPED_BYTES = 16 << 20
"""Of what a client still sends, so much is read and dropped. The rest waits until the connection is closed."""


@dataclass(slots=True)
class _Stay:
    until: asyncio.TimerHandle
    dropped: int = 0


class Lingering:
    """Keeps ended connections for a moment. Used on the event loop only."""

    def __init__(self) -> None:
        self._stays: dict[socket.socket, _Stay] = {}
        self._is_open = True

    def take(self, ended: socket.socket) -> None:
        """Tell the client that nothing more comes, and close `ended` when it has done so too, or a little later."""
        with contextlib.suppress(OSError):  # the client has gone already
            ended.shutdown(socket.SHUT_WR)
        if not self._is_open:
            ended.close()
            return
        if len(self._stays) >= MOST:
            self._let_go(next(iter(self._stays)))
        ended.setblocking(False)
        loop = asyncio.get_running_loop()
        self._stays[ended] = _Stay(loop.call_later(LINGER_S, self._let_go, ended))
        loop.add_reader(ended, self._drop, ended)

    def close(self) -> None:
        """Let all of them go, and from now on each at once."""
        self._is_open = False
        for ended in list(self._stays):
            self._let_go(ended)

    def _drop(self, ended: socket.socket) -> None:
        """Drop what the client sends."""
        try:
            size = len(ended.recv(READ_BYTES))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        stay = self._stays[ended]
        stay.dropped += size
        if size == 0:
            self._let_go(ended)
        elif stay.dropped >= DROPPED_BYTES:
            asyncio.get_running_loop().remove_reader(ended)

    def _let_go(self, ended: socket.socket) -> None:
        self._stays.pop(ended).until.cancel()
        asyncio.get_running_loop().remove_reader(ended)
        ended.close()
