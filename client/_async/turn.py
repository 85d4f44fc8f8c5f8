"""A turn as it runs."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

from httpx_sse import EventSource

from client.calls import Call, Seconds
from client.edge import mapped_errors
from client.errors import StreamBroken
from client.models import TokenEvent, Turn
from client.stream import TurnDecoder
from client.transport import AsyncTransport


class AsyncTurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, decoder: TurnDecoder, tokens: AsyncIterator[TokenEvent]) -> None:
        self._decoder = decoder
        self._tokens = tokens

    def __aiter__(self) -> AsyncIterator[TokenEvent]:
        return self._tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'over' if self._decoder.is_over else 'running'})"

    @property
    def turn(self) -> Turn:
        """The turn, over or paused. Raises `RuntimeError` while it runs."""
        return self._decoder.turn


@asynccontextmanager
async def stream_turn(transport: AsyncTransport, call: Call[Turn], timeout: Seconds) -> AsyncIterator[AsyncTurnStream]:
    """Run a turn and read its tokens as they come. Leaving the block early cancels the turn."""
    decoder: TurnDecoder | None = None
    try:
        async with transport.stream(call, timeout) as source:
            decoder = TurnDecoder(source.response.headers.get("x-request-id"))
            async with aclosing(_read(source, decoder)) as tokens:
                yield AsyncTurnStream(decoder, tokens)
    finally:
        if decoder is not None and not decoder.is_over:
            await transport.abandon(call)


async def _read(source: EventSource, decoder: TurnDecoder) -> AsyncGenerator[TokenEvent, None]:
    with mapped_errors(lost=StreamBroken):
        async with aclosing(source.aiter_sse()) as events:
            async for event in events:
                tokens = decoder.feed(event)
                if tokens is not None:
                    yield tokens
    decoder.end()
