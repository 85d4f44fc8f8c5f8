"""Sends calls over one pool of connections: once blocking, once with asyncio, otherwise the same."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager, closing, contextmanager, suppress
from copy import copy
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
from httpx_sse import EventSource

from client.calls import UNSET, Call, Seconds
from client.edge import Connection, check_status, mapped_errors, note_response, read_answer, shown, to_request
from client.errors import ConnectionLost, DjinnError, Timeout
from client.files import CHUNK_BYTES, read_chunks, written_whole
from client.retries import Attempts

T = TypeVar("T")

ABANDON_S = 5.0
"""How long the answer to a cancelled call is waited for, which must be undone or come to its end."""

Trace = Callable[[str, Mapping[str, object]], Awaitable[None]]
"""Called with an event's name and what belongs to it."""


class _Shared:
    """What both transports have. `timeout` of a call counts instead of the connection's."""

    def __init__(self, connection: Connection, *, is_ours: bool) -> None:
        self._connection = connection
        self._is_ours = is_ours

    @property
    def address(self) -> str:
        """That of the server, without a password."""
        return shown(self._connection.url)

    @property
    def max_retries(self) -> int:
        """How often a call is retried."""
        return self._connection.max_retries

    def with_options(self, timeout: Seconds, max_retries: int | None) -> Self:
        """Another one over the same connections, which it leaves open when it is closed."""
        other = copy(self)
        other._connection, other._is_ours = self._connection.changed(timeout, max_retries), False
        return other

    @property
    def _abandon_s(self) -> float:
        return min(ABANDON_S, self._connection.timeout or ABANDON_S)


class Transport(_Shared):
    """The blocking one. Without `http` it has connections of its own."""

    def __init__(self, connection: Connection, http: httpx.Client | None = None) -> None:
        super().__init__(connection, is_ours=http is None)
        self._http = http or httpx.Client(**connection.options())

    def send(self, call: Call[T], timeout: Seconds = UNSET) -> T:
        """What the call asks for."""
        attempts = Attempts(call, self.max_retries)
        try:
            while True:
                try:
                    return self._send(call, timeout, attempts.key)
                except DjinnError as error:
                    time.sleep(attempts.wait_after(error))
        except (KeyboardInterrupt, Timeout, ConnectionLost):
            self.abandon(call)
            raise

    def _send(self, call: Call[T], timeout: Seconds, key: str | None = None) -> T:
        return read_answer(call, self._answer(to_request(self._http, self._connection, call, timeout, key=key)))

    def _answer(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        with mapped_errors():
            response = self._http.send(request, stream=stream)
        note_response(response)
        return response

    def abandon(self, call: Call[Any]) -> None:
        """Cancel on the server what the call has begun."""
        if call.abandon is not None and self.max_retries:  # else it has no key, and ends with the connection
            with suppress(DjinnError):
                self._send(call.abandon, self._abandon_s)

    @contextmanager
    def stream(self, call: Call[T], timeout: Seconds = UNSET) -> Iterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        with closing(self._begin(call, timeout)) as response:
            yield EventSource(response)

    def download(self, call: Call[None], path: Path, timeout: Seconds = UNSET) -> None:
        """Write the answer to the file `path`, which appears when it is whole. Raises also `OSError`."""
        with closing(self._begin(call, timeout)) as response, written_whole(path) as file, mapped_errors():
            for chunk in response.iter_bytes(CHUNK_BYTES):
                file.write(chunk)

    def upload(self, call: Call[T], path: Path, timeout: Seconds = UNSET) -> T:
        """What the call, with the file `path` as its body or in its form, asks for. Raises also `OSError`."""
        with path.open("rb") as file:
            body = file, os.fstat(file.fileno()).st_size
            response = self._answer(to_request(self._http, self._connection, call, timeout, file=body))
        return read_answer(call, response)

    def _begin(self, call: Call[T], timeout: Seconds) -> httpx.Response:
        """An answer that is not read yet and no error."""
        attempts = Attempts(call, self.max_retries)
        while True:
            try:
                request = to_request(self._http, self._connection, call, timeout, key=attempts.key)
                response = self._answer(request, stream=True)
                if response.is_success:
                    return response
                with closing(response), mapped_errors():
                    response.read()
                check_status(response)
            except DjinnError as error:
                time.sleep(attempts.wait_after(error))

    def close(self) -> None:
        """Close every connection, if they are this transport's."""
        if self._is_ours:
            self._http.close()


class AsyncTransport(_Shared):
    """The one for asyncio. `trace` is told what becomes of each request: https://www.encode.io/httpcore/extensions/."""

    def __init__(
        self, connection: Connection, trace: Trace | None = None, http: httpx.AsyncClient | None = None
    ) -> None:
        super().__init__(connection, is_ours=http is None)
        self._http = http or httpx.AsyncClient(**connection.options())
        self._extensions = {} if trace is None else {"trace": trace}

    async def send(self, call: Call[T], timeout: Seconds = UNSET) -> T:
        """What the call asks for."""
        try:
            return await self._settled(call, self._send(call, timeout))
        except (asyncio.CancelledError, Timeout, ConnectionLost):
            await self.abandon(call)
            raise

    async def _send(self, call: Call[T], timeout: Seconds = UNSET) -> T:
        attempts = Attempts(call, self.max_retries)
        while True:
            try:
                request = to_request(self._http, self._connection, call, timeout, key=attempts.key)
                return read_answer(call, await self._answer(request))
            except DjinnError as error:
                await asyncio.sleep(attempts.wait_after(error))

    async def _answer(self, request: httpx.Request, *, stream: bool = False) -> httpx.Response:
        request.extensions |= self._extensions
        with mapped_errors():
            response = await self._http.send(request, stream=stream)
        note_response(response)
        return response

    async def abandon(self, call: Call[Any]) -> None:
        """Cancel on the server what the call has begun."""
        if call.abandon is not None and self.max_retries:  # else it has no key, and ends with the connection
            with suppress(DjinnError, TimeoutError):
                async with asyncio.timeout(self._abandon_s):
                    await self._send(call.abandon)

    @asynccontextmanager
    async def stream(self, call: Call[T], timeout: Seconds = UNSET) -> AsyncIterator[EventSource]:
        """The answer as a source of events; leaving the block closes its connection."""
        async with aclosing(await self._begin(call, timeout)) as response:
            yield EventSource(response)

    async def download(self, call: Call[None], path: Path, timeout: Seconds = UNSET) -> None:
        """Write the answer to the file `path`, which appears when it is whole. Raises also `OSError`."""
        async with aclosing(await self._begin(call, timeout)) as response:
            with written_whole(path) as file, mapped_errors():
                async for chunk in response.aiter_bytes(CHUNK_BYTES):
                    await asyncio.to_thread(file.write, chunk)

    async def upload(self, call: Call[T], path: Path, timeout: Seconds = UNSET) -> T:
        """What the call, with the file `path` as its body or in its form, asks for. Raises also `OSError`."""
        return await self._settled(call, self._upload(call, path, timeout))

    async def _upload(self, call: Call[T], path: Path, timeout: Seconds) -> T:
        with await asyncio.to_thread(path.open, "rb") as file:
            body = file if call.form is not None else read_chunks(file), os.fstat(file.fileno()).st_size
            response = await self._answer(to_request(self._http, self._connection, call, timeout, file=body))
        return read_answer(call, response)

    async def _begin(self, call: Call[T], timeout: Seconds) -> httpx.Response:
        """An answer that is not read yet and no error."""
        attempts = Attempts(call, self.max_retries)
        while True:
            try:
                request = to_request(self._http, self._connection, call, timeout, key=attempts.key)
                response = await self._answer(request, stream=True)
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

    async def close(self) -> None:
        """Close every connection, if they are this transport's."""
        if self._is_ours:
            await self._http.aclose()
