"""The client for asyncio, used as if it blocked: so one test holds for both clients."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Self

from anyio.from_thread import BlockingPortal

import client

KINDS = tuple(getattr(client, name) for name in client.__all__ if name.startswith("Async"))


class Blocking:
    """One object of the client for asyncio; its methods run on the portal's event loop and are waited for."""

    def __init__(self, portal: BlockingPortal, wrapped: Any) -> None:
        self._portal = portal
        self._wrapped = wrapped

    def __getattr__(self, name: str) -> Any:
        return self._seen(getattr(self._wrapped, name))

    def __iter__(self) -> Iterator[Any]:
        return self._each(aiter(self._wrapped))

    def __enter__(self) -> Self:
        self._portal.call(self._wrapped.__aenter__)
        return self

    def __exit__(self, *raised: object) -> None:
        self._portal.call(self._wrapped.__aexit__, *raised)

    def _seen(self, value: Any) -> Any:
        """What the blocking client would have in the place of `value`."""
        if isinstance(value, KINDS):
            return Blocking(self._portal, value)
        if inspect.ismethod(value):
            return lambda *args, **options: self._seen(value(*args, **options))
        if inspect.isawaitable(value):
            return self._seen(self._portal.call(_wait, value))
        if isinstance(value, AbstractAsyncContextManager):
            return self._block(value)
        if isinstance(value, AsyncIterator):
            return self._each(value)
        return [self._seen(item) for item in value] if isinstance(value, list) else value

    @contextmanager
    def _block(self, manager: AbstractAsyncContextManager[Any]) -> Iterator[Any]:
        with self._portal.wrap_async_context_manager(manager) as value:
            yield self._seen(value)

    def _each(self, values: AsyncIterator[Any]) -> Iterator[Any]:
        while True:
            try:
                yield self._seen(self._portal.call(_wait, anext(values)))
            except StopAsyncIteration:
                return


async def _wait(value: Awaitable[Any]) -> Any:
    return await value
