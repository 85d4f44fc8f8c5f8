"""HTTP/1.1 to other replicas, by h11 on asyncio's connections, which are kept for later requests.

Every forwarded request and every part of its stream passes here, so there are no layers in between. httpcore was tried:
its pool looks at all open connections for each request, and one of its connections alone takes twice the time.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import h11

CONNECT_S = 1.0
IDLE_S = 30.0
"""How long an unused connection is kept. Servers keep it longer."""
SILENT_S = 6.0
"""How long a replica may acknowledge nothing of what was sent to it."""
HIGH_BYTES = 256 << 10
"""With more bytes that nobody has taken, reading pauses."""
LONGEST_HEAD = 64 << 10
ENDED, NO_HTTP = "went away before its answer was there", "has answered what is not HTTP"
Headers = list[tuple[bytes, bytes]]


class WireLost(OSError):
    """The connection has ended, or did not bring valid HTTP. Its text says what the replica did."""


def limit_delivery(transport: asyncio.BaseTransport, seconds: float = SILENT_S) -> None:
    """Have the system drop what it has not delivered after so many seconds (RFC 5482), or when the connection closes.
    0: it tries for minutes, also then. A request that comes after its client has repeated it undoes later turns.
    """
    connection = transport.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", seconds > 0, 0))
    if sys.platform == "linux":
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


class Wire(asyncio.Protocol):
    """A connection to another replica, for one request at a time."""

    @classmethod
    async def open(cls, address: tuple[str, int]) -> Wire:
        """A connection to that host and port. Raises `OSError`."""
        async with asyncio.timeout(CONNECT_S):
            return (await asyncio.get_running_loop().create_connection(cls, *address))[1]

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        """Those of the last answer, with names in small letters."""
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=LONGEST_HEAD)
        self._transport: asyncio.Transport
        self._untaken = 0
        self.is_aborted = False
        """Whether it was ended here."""
        self._expiry: asyncio.TimerHandle
        self._news, self._room = asyncio.Event(), asyncio.Event()
        """What a reader and a writer wait for."""
        self._room.set()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        limit_delivery(transport)

    def data_received(self, data: bytes) -> None:
        self._http.receive_data(data)
        self._untaken += len(data)
        if self._untaken > HIGH_BYTES:
            self._transport.pause_reading()
        self._news.set()

    def eof_received(self) -> None:
        self._http.receive_data(b"")
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
        self.is_aborted = True
        self._transport.abort()
        self._news.set()

    @property
    def is_fresh(self) -> bool:
        """Whether nothing has arrived and nobody has closed it since its last request."""
        return not self.is_aborted and self._http.trailing_data == (b"", False)

    def rest(self) -> bool:
        """Wait for the next request, for a while. Ends the connection and returns False if the last is unfinished."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE or not self.is_fresh:
            self.abort()
            return False
        self._http.start_next_cycle()
        self._expiry = asyncio.get_running_loop().call_later(IDLE_S, self.abort)
        return True

    def wake(self) -> bool:
        """Take the next request after a rest. Returns False if the connection has ended meanwhile."""
        self._expiry.cancel()
        if not self.is_fresh:
            self.abort()
        return self.is_fresh

    async def ask(self, method: bytes, target: bytes, headers: Headers, content: bytes | AsyncIterator[bytes]) -> None:
        """Send a request, and wait for the head of its answer, maybe a 101. Raises `WireLost`, and as `content`."""
        self.status, http, write = 0, self._http, self._transport.write
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
        while self.status < 200 and self.status != HTTPStatus.SWITCHING_PROTOCOLS:
            event = await self._event()
            self.status, self.headers = event.status_code, list(event.headers)

    def hand_over(self) -> socket.socket:
        """The socket, for a new owner, after an answer 101. Raises `WireLost` if the other end closed or used it."""
        if not self.is_fresh:
            raise WireLost("has closed the connection, or has not waited to be asked")
        self._transport.pause_reading()
        limit_delivery(self._transport, 0)  # the engines have their own limits
        own: socket.socket = self._transport.get_extra_info("socket").dup()
        self._transport.abort()  # closes its own descriptor alone
        return own

    async def part(self) -> tuple[bytes, bool]:
        """The next part of the answer's body, all that has arrived, and whether it is the last. Raises `WireLost`."""
        event, found = await self._event(), b""
        while isinstance(event, h11.Data):
            found += event.data
            event = self._next()
        return found, event is not h11.NEED_DATA

    async def read(self, most: int) -> bytes:
        """The whole body. Raises `WireLost`, also for one with more bytes than `most`."""
        content, is_over = bytearray(), False
        while not is_over:
            part, is_over = await self.part()
            content += part
            if len(content) > most:
                raise WireLost("has sent an answer that is too large")
        return bytes(content)

    def _next(self) -> Any:
        try:
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            raise WireLost(ENDED if self._http.trailing_data[1] else NO_HTTP) from error
        if isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
            raise WireLost(NO_HTTP)
        return event

    async def _event(self) -> Any:
        """The next one, as soon as it has arrived."""
        while not self.is_aborted:
            if (event := self._next()) is not h11.NEED_DATA:
                return event
            self._untaken = 0
            self._transport.resume_reading()
            self._news.clear()
            await self._news.wait()
        raise WireLost(ENDED)
