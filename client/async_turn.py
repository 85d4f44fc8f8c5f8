"""A turn as it runs, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from httpx_sse import EventSource

from client.edge import mapped_errors
from client.errors import StreamBroken
from client.models import TokenEvent, Turn
from client.stream import TurnDecoder


class AsyncTurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, source: EventSource) -> None:
        self._decoder = TurnDecoder(source.response.headers.get("x-request-id"))
        self._tokens = self._read(source)

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._tokens

    async def _read(self, source: EventSource) -> AsyncGenerator[TokenEvent, None]:
        with mapped_errors(lost=StreamBroken):
            async with aclosing(source.aiter_sse()) as events:
                async for event in events:
                    tokens = self._decoder.feed(event)
                    if tokens is not None:
                        yield tokens
        self._decoder.end()

    @property
    def turn(self) -> Turn:
        """The turn, over or paused. Raises `RuntimeError` while it runs."""
        return self._decoder.turn

    async def aclose(self) -> None:
        """Stop reading."""
        await self._tokens.aclose()
