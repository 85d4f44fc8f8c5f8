"""Connections to other servers, made before they are needed and used again."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import defaultdict
from dataclasses import dataclass

from app.cluster.moves.peers import Peer
from app.domain.errors import PeerAway

CONNECT_S = 5.0
IDLE_S = 2.0
"""How long a connection is kept that nobody uses. The other server keeps it longer, so it closes none as a step of a
move comes: whether that was taken would have to be asked.
"""
MOST_IDLE = 4
"""For each server, as many as sessions are sent at the same time."""


@dataclass(frozen=True, slots=True)
class _Idle:
    connection: socket.socket
    since: float
    """By the event loop's clock."""


class PeerConnections:
    """Connections by the address that they lead to. Used on the event loop."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[str, int], list[_Idle]] = defaultdict(list)
        self._making = set[asyncio.Task[None]]()
        self._timer: asyncio.TimerHandle | None = None

    async def take(self, peer: Peer) -> socket.socket:
        """An unused connection; the caller closes it or gives it back. Raises `PeerAway`."""
        self._drop_old()
        idle = self._idle[peer.address]
        while idle:
            connection = idle.pop().connection
            if _is_quiet(connection):
                return connection
            connection.close()
        return await _connect(peer)

    def give(self, peer: Peer, connection: socket.socket) -> None:
        """Take back a connection whose last answer has been read."""
        loop, idle = asyncio.get_running_loop(), self._idle[peer.address]
        if len(idle) >= MOST_IDLE:
            connection.close()
            return
        idle.append(_Idle(connection, loop.time()))
        if self._timer is None:
            self._timer = loop.call_later(IDLE_S, self._drop_old)

    def prepare(self, peer: Peer) -> None:
        """Begin to make a connection that is needed soon, unless there is one."""
        if not self._idle[peer.address]:
            task = asyncio.create_task(self._make(peer))
            self._making.add(task)
            task.add_done_callback(self._making.discard)

    def close(self) -> None:
        """Close unused connections."""
        for task in list(self._making):
            task.cancel()
        for idle in self._idle.values():
            for each in idle:
                each.connection.close()
        self._idle.clear()
        if self._timer is not None:
            self._timer.cancel()

    async def _make(self, peer: Peer) -> None:
        with contextlib.suppress(PeerAway):  # the caller that needs it gets the error
            self.give(peer, await _connect(peer))

    def _drop_old(self) -> None:
        """Close connections that were unused for long."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for address, idle in list(self._idle.items()):
            fresh = [each for each in idle if loop.time() - each.since < IDLE_S]
            for each in idle:
                if each not in fresh:
                    each.connection.close()
            if fresh:
                self._idle[address] = fresh
            else:
                del self._idle[address]
        if self._idle:
            oldest = min(each.since for idle in self._idle.values() for each in idle)
            self._timer = loop.call_at(oldest + IDLE_S, self._drop_old)


def _is_quiet(connection: socket.socket) -> bool:
    """Whether the other end has neither closed it nor said anything that nobody has asked for."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


async def _connect(peer: Peer) -> socket.socket:
    loop, (host, port) = asyncio.get_running_loop(), peer.address
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            family, kind, protocol, _, address = found[0]
            connection = socket.socket(family, kind, protocol)
            try:
                connection.setblocking(False)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await loop.sock_connect(connection, address)
            except BaseException:
                connection.close()
                raise
    except (OSError, TimeoutError) as error:
        raise PeerAway(f"{peer.name} at {peer.url} cannot be reached: {error or 'it takes too long'}") from error
    return connection
