"""Sends calls over one pool of connections: once blocking, once with asyncio, otherwise the same."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import httpx
from httpx_sse import EventSource

from client.calls import Call
from client.edge import Connection, check_status, mapped_errors, read_answer, to_request

T = TypeVar("T")


class Transport:
    """The blocking one."""

    def __init__(self, connection: Connection) -> None:
        self._http = httpx.Client(**connection.options())

    def send(self, call: Call[T]) -> T:
        """What the call asks for."""
        with mapped_errors():
            response = self._http.send(to_request(self._http, call))
        return read_answer(call, response)

    @contextmanager
    def stream(self, call: Call[T]) -> Iterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        with mapped_errors():
            response = self._http.send(to_request(self._http, call), stream=True)
        try:
            if not response.is_success:
                with mapped_errors():
                    response.read()
            check_status(response)
            yield EventSource(response)
        finally:
            response.close()

    def close(self) -> None:
        """Close every connection."""
        self._http.close()


class AsyncTransport:
    """The one for asyncio."""

    def __init__(self, connection: Connection) -> None:
        self._http = httpx.AsyncClient(**connection.options())

    async def send(self, call: Call[T]) -> T:
        """What the call asks for."""
        with mapped_errors():
            response = await self._http.send(to_request(self._http, call))
        return read_answer(call, response)

    @asynccontextmanager
    async def stream(self, call: Call[T]) -> AsyncIterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        with mapped_errors():
            response = await self._http.send(to_request(self._http, call), stream=True)
        try:
            if not response.is_success:
                with mapped_errors():
                    await response.aread()
            check_status(response)
            yield EventSource(response)
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()
