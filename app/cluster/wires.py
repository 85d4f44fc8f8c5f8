"""Connections of the HTTP client to other replicas, on asyncio alone: a hop is made for each request, and most of what
it would cost otherwise are layers that are for other event loops.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

import httpcore

HIGH_BYTES = 256 << 10
"""Read and not taken yet: with more, nothing more is read."""
UNSENT_BYTES = 64 << 10
"""Written and not sent yet, at most."""
READABLE = "is_readable"
"""What the pool asks of a connection that nobody uses: whether its other end has closed it, or said something."""


class Wires(httpcore.AsyncNetworkBackend):
    """Makes them."""

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 (as the client calls it)
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """A connection. Raises `httpcore.ConnectError`, `httpcore.ConnectTimeout`."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout):
                _, wire = await loop.create_connection(Wire, host, port)
        except TimeoutError as error:
            raise httpcore.ConnectTimeout(str(error)) from error
        except OSError as error:
            raise httpcore.ConnectError(str(error)) from error
        return wire


class Wire(asyncio.Protocol, httpcore.AsyncNetworkStream):
    """One of them. Its timeouts are those of who waits."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._read, self._unsent = bytearray(), bytearray()
        self._is_over = False
        self._news: asyncio.Future[None] | None = None
        """Waited for by a reader."""
        self._room = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It is there."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._room.set()
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Keep what has come."""
        self._read += data
        if len(self._read) > HIGH_BYTES and self._transport is not None:
            self._transport.pause_reading()
        self._tell()

    def eof_received(self) -> None:
        """The other end says nothing more."""
        self._is_over = True
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._is_over = True
        self._room.set()
        self._tell()

    def pause_writing(self) -> None:
        """The other end must read first."""
        self._room.clear()

    def resume_writing(self) -> None:
        """It has."""
        self._room.set()

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ASYNC109
        """What has come, as soon as anything has; empty at the end."""
        while not self._read and not self._is_over:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        found, self._read = bytes(self._read), bytearray()
        if self._transport is not None and not self._is_over:
            self._transport.resume_reading()
        return found

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Send it. Raises `httpcore.WriteError`."""
        if self._transport is None or self._transport.is_closing() or self._is_over:
            raise httpcore.WriteError("the connection is closed")
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)  # the head and a small body in one packet
        self._unsent += buffer
        if len(self._unsent) > UNSENT_BYTES:
            self._send()
        if not self._room.is_set():
            await self._room.wait()

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, bytearray()
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(unsent)

    async def aclose(self) -> None:
        """End it at once."""
        if self._transport is not None:
            self._transport.abort()

    def get_extra_info(self, info: str) -> Any:
        """What the pool asks."""
        return bool(self._read) or self._is_over if info == READABLE else None
