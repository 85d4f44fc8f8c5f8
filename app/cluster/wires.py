"""HTTP/1.1 to other replicas, by h11 on asyncio's connections, which are kept for later requests.

Every forwarded request and every part of its stream passes here, so there are no layers in between. httpcore was tried:
its pool looks at all open connections for each request.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import h11

CONNECT_S = 1.0
MOST_IDLE, IDLE_S = 256, 30.0
"""How many unused connections to each replica are kept, and for how long. Servers keep them longer."""
HIGH_BYTES = 256 << 10
"""With more bytes that nobody has taken, reading pauses."""
LONGEST_HEAD = 64 << 10

Headers = list[tuple[bytes, bytes]]


class WireLost(OSError):
    """The connection has ended, or did not bring valid HTTP."""


class Wire(asyncio.Protocol):
    """A connection to another replica, for one request at a time."""

    def __init__(self) -> None:
        self.was_used = False
        """Whether it has had a request before. The other end may close such a connection just as the next one is sent.
        """
        self.idle_since = 0.0
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST_HEAD)
        self._transport: asyncio.Transport
        self._read = bytearray()
        self._has_ended = self._is_aborted = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        """What a reader and a writer wait for."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._room.set()
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        self._read += data
        if len(self._read) > HIGH_BYTES:
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> None:
        self._has_ended = True
        self._news.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._room.set()
        self.eof_received()

    def pause_writing(self) -> None:
        self._room.clear()

    def resume_writing(self) -> None:
        self._room.set()

    def abort(self) -> None:
        """End it at once: its reader gets `WireLost`."""
        self._is_aborted = True
        self._transport.abort()
        self._news.set()

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has arrived and nobody has closed it since its last request."""
        return not (self._has_ended or self._is_aborted or self._read)

    def restart(self, now: float) -> bool:
        """Prepare for the next request. Returns False if the last exchange is not complete."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or not self.is_fresh:
            return False
        self._http.start_next_cycle()
        self.was_used, self.idle_since = True, now
        return True

    async def ask(
        self, method: bytes, target: bytes, headers: Headers, content: bytes | AsyncIterator[bytes]
    ) -> tuple[int, Headers]:
        """Send a request. Returns the status of its answer, which may be 101 (see `hand_over`), and the headers, with
        names in small letters. Raises `WireLost`, and what `content` raises.
        """
        http, write = self._http, self._transport.write
        head = http.send(h11.Request(method=method, target=target, headers=headers)) or b""
        if isinstance(content, bytes):
            body = (http.send(h11.Data(content)) or b"") if content else b""
            write(head + body + (http.send(h11.EndOfMessage()) or b""))
        else:
            write(head)
            async for part in content:
                if not self.is_fresh:  # it has answered already, or is gone
                    break
                write(http.send(h11.Data(part)) or b"")
                await self._room.wait()
            else:
                write(http.send(h11.EndOfMessage()) or b"")
        while True:
            event = self._next()
            if event is h11.NEED_DATA:
                await self._more()
            elif isinstance(event, h11.Response) or event.status_code == HTTPStatus.SWITCHING_PROTOCOLS:
                return event.status_code, list(event.headers)

    def hand_over(self) -> socket.socket:
        """The socket, after an answer with status 101. Its new owner speaks with the other end from now on. Raises
        `WireLost` if that has closed it, or has sent something already.
        """
        if self._has_ended or self._read or self._http.trailing_data[0]:
            raise WireLost("it has closed the connection, or has not waited to be asked")
        self._transport.pause_reading()
        own: socket.socket = self._transport.get_extra_info("socket").dup()
        self._transport.abort()  # closes its own descriptor alone
        return own

    async def part(self) -> tuple[bytes, bool]:
        """The next part of the answer's body, all that has arrived, and whether it is the last. Raises `WireLost`."""
        found = b""
        while True:
            event = self._next()
            if isinstance(event, h11.Data):
                found += event.data
            elif event is not h11.NEED_DATA:
                return found, True
            elif found:
                return found, False
            else:
                await self._more()

    def _next(self) -> Any:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise WireLost(str(error)) from error
        if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise WireLost("its answer was no HTTP")
        return event

    async def _more(self) -> None:
        """Wait until something arrives, and give it to h11. At the end of the connection that is an empty string."""
        while self.is_fresh:
            self._news.clear()
            await self._news.wait()
        if self._is_aborted:
            raise WireLost("it was closed")
        found, self._read = bytes(self._read), bytearray()
        self._http.receive_data(found)
        if not self._has_ended:
            self._transport.resume_reading()


class Wires:
    """Connections to other replicas. Used on one event loop."""

    def __init__(self) -> None:
        self._idle: defaultdict[tuple[str, int], list[Wire]] = defaultdict(list)

    async def take(self, address: tuple[str, int]) -> Wire:
        """A connection to that host and port, which nobody else uses. Raises `OSError`."""
        loop, idle = asyncio.get_running_loop(), self._idle[address]
        while idle:
            wire = idle.pop()
            if wire.is_fresh and loop.time() - wire.idle_since < IDLE_S:
                return wire
            wire.abort()
        async with asyncio.timeout(CONNECT_S):
            return (await loop.create_connection(Wire, *address))[1]

    def give_back(self, address: tuple[str, int], wire: Wire) -> None:
        """Keep the connection for the next request if its exchange is complete. Else close it."""
        now, idle = asyncio.get_running_loop().time(), self._idle[address]
        if not wire.restart(now) or len(idle) >= MOST_IDLE:
            wire.abort()
            return
        idle.append(wire)
        while not idle[0].is_fresh or now - idle[0].idle_since > IDLE_S:
            idle.pop(0).abort()

    def close(self) -> None:
        """Close those that nobody uses."""
        for idle in self._idle.values():
            while idle:
                idle.pop().abort()
