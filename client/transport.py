"""Sends calls over one pool of connections: once blocking, once with asyncio, otherwise the same."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httpx
from httpx_sse import EventSource

from client.calls import Call
from client.edge import Connection, check_status, mapped_errors, read_answer, to_request, to_upload
from client.errors import ConnectionLost, DjinnError, Timeout
from client.files import CHUNK_BYTES, read_chunks, written_whole
from client.retries import Attempts

T = TypeVar("T")

ABANDON_S = 5.0
"""How long the answer to a cancelled call is waited for, which must be undone or come to its end."""

Trace = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Called with an event's name and what belongs to it."""


class Transport:
    """The blocking one."""

    def __init__(self, connection: Connection) -> None:
        self._http = httpx.Client(**connection.options())
        self._max_retries = connection.max_retries
        self._abandon_s = min(ABANDON_S, connection.timeout or ABANDON_S)

    def send(self, call: Call[T]) -> T:
        """What the call asks for."""
        attempts = Attempts(call, self._max_retries)
        try:
            while True:
                try:
                    return self._send(to_request(self._http, call, attempts.key), call)
                except DjinnError as error:
                    time.sleep(attempts.wait_after(error))
        except (KeyboardInterrupt, Timeout, ConnectionLost):
            self.abandon(call)
            raise

    def _send(self, request: httpx.Request, call: Call[T]) -> T:
        with mapped_errors():
            response = self._http.send(request)
        return read_answer(call, response)

    def abandon(self, call: Call[Any]) -> None:
        """Cancel on the server what the call has begun."""
        if call.abandon is not None and self._max_retries:  # else it has no key, and ends with the connection
            with suppress(DjinnError):
                request = to_request(self._http, call.abandon)
                request.extensions["timeout"] = httpx.Timeout(self._abandon_s).as_dict()
                self._send(request, call.abandon)

    @contextmanager
    def stream(self, call: Call[T]) -> Iterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        with self._open(call) as response:
            yield EventSource(response)

    def download(self, call: Call[None], path: Path) -> None:
        """Write the answer to the file `path`, which appears when it is whole. Raises also `OSError`."""
        with self._open(call) as response, written_whole(path) as file, mapped_errors():
            for chunk in response.iter_bytes(CHUNK_BYTES):
                file.write(chunk)

    def upload(self, call: Call[T], path: Path) -> T:
        """What the call, with the file `path` as its body, asks for. Raises also `OSError`."""
        with path.open("rb") as file, mapped_errors():
            size = os.fstat(file.fileno()).st_size
            response = self._http.send(to_upload(self._http, call, file, size))
        return read_answer(call, response)

    @contextmanager
    def _open(self, call: Call[T]) -> Iterator[httpx.Response]:
        """An answer that is not read yet and no error."""
        response = self._begin(call)
        try:
            yield response
        finally:
            response.close()

    def _begin(self, call: Call[T]) -> httpx.Response:
        attempts = Attempts(call, self._max_retries)
        while True:
            try:
                with mapped_errors():
                    response = self._http.send(to_request(self._http, call, attempts.key), stream=True)
                if response.is_success:
                    return response
                with closing(response), mapped_errors():
                    response.read()
                check_status(response)
            except DjinnError as error:
                time.sleep(attempts.wait_after(error))

    def close(self) -> None:
        """Close every connection."""
        self._http.close()


class AsyncTransport:
    """The one for asyncio. `trace` is told what becomes of each request: https://www.encode.io/httpcore/extensions/."""

    def __init__(self, connection: Connection, trace: Trace | None = None) -> None:
        self._http = httpx.AsyncClient(**connection.options())
        self._extensions = {} if trace is None else {"trace": trace}
        self._max_retries = connection.max_retries
        self._abandon_s = min(ABANDON_S, connection.timeout or ABANDON_S)

    async def send(self, call: Call[T]) -> T:
        """What the call asks for."""
        try:
            return await self._settled(call, self._send(call))
        except (asyncio.CancelledError, Timeout, ConnectionLost):
            await self.abandon(call)
            raise

    async def _send(self, call: Call[T]) -> T:
        attempts = Attempts(call, self._max_retries)
        while True:
            try:
                with mapped_errors():
                    response = await self._http.send(self._traced(to_request(self._http, call, attempts.key)))
                return read_answer(call, response)
            except DjinnError as error:
                await asyncio.sleep(attempts.wait_after(error))

    async def abandon(self, call: Call[Any]) -> None:
        """Cancel on the server what the call has begun."""
        if call.abandon is not None and self._max_retries:  # else it has no key, and ends with the connection
            with suppress(DjinnError, TimeoutError):
                async with asyncio.timeout(self._abandon_s):
                    await self._send(call.abandon)

    @asynccontextmanager
    async def stream(self, call: Call[T]) -> AsyncIterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        async with self._open(call) as response:
            yield EventSource(response)

    async def download(self, call: Call[None], path: Path) -> None:
        """Write the answer to the file `path`, which appears when it is whole. Raises also `OSError`."""
        async with self._open(call) as response:
            with written_whole(path) as file, mapped_errors():
                async for chunk in response.aiter_bytes(CHUNK_BYTES):
                    await asyncio.to_thread(file.write, chunk)

    async def upload(self, call: Call[T], path: Path) -> T:
        """What the call, with the file `path` as its body, asks for. Raises also `OSError`."""
        return await self._settled(call, self._upload(call, path))

    async def _upload(self, call: Call[T], path: Path) -> T:
        with await asyncio.to_thread(path.open, "rb") as file, mapped_errors():
            size = os.fstat(file.fileno()).st_size
            response = await self._http.send(self._traced(to_upload(self._http, call, read_chunks(file), size)))
        return read_answer(call, response)

    @asynccontextmanager
    async def _open(self, call: Call[T]) -> AsyncIterator[httpx.Response]:
        """An answer that is not read yet and no error."""
        response = await self._begin(call)
        try:
            yield response
        finally:
            await response.aclose()

    async def _begin(self, call: Call[T]) -> httpx.Response:
        attempts = Attempts(call, self._max_retries)
        while True:
            try:
                with mapped_errors():
                    request = self._traced(to_request(self._http, call, attempts.key))
                    response = await self._http.send(request, stream=True)
                if response.is_success:
                    return response
                async with aclosing(response):
                    with mapped_errors():
                        await response.aread()
                check_status(response)
            except DjinnError as error:
                await asyncio.sleep(attempts.wait_after(error))

    async def _settled(self, call: Call[T], asking: Coroutine[Any, Any, T]) -> T:
        """The answer. A caller who is cancelled leaves nothing half done: the call is undone, or comes to its end."""
        if call.undo is None and not call.comes_to_its_end:
            return await asking
        answer = asyncio.ensure_future(asking)
        try:
            return await asyncio.shield(answer)
        except asyncio.CancelledError:
            with suppress(DjinnError, TimeoutError):
                async with asyncio.timeout(ABANDON_S):
                    answered = await answer
                    if call.undo is not None:
                        await self._send(call.undo(answered))
            raise

    def _traced(self, request: httpx.Request) -> httpx.Request:
        request.extensions |= self._extensions
        return request

    async def close(self) -> None:
        """Close every connection."""
        await self._http.aclose()
