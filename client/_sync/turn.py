# Generated from client/_async by `python client/_generate.py`: make changes there.
"""A turn as it runs."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext

from httpx_sse import EventSource

from client.calls import Call, Seconds
from client.edge import mapped_errors
from client.errors import StreamBroken
from client.models import TokenEvent, Turn
from client.stream import TurnDecoder
from client.transport import Transport


class TurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, decoder: TurnDecoder, tokens: Iterator[TokenEvent]) -> None:
        self._decoder = decoder
        self._tokens = tokens

    def __iter__(self) -> Iterator[TokenEvent]:
        return self._tokens

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'over' if self._decoder.is_over else 'running'})"

    @property
    def turn(self) -> Turn:
        """The turn, over or paused. Raises `RuntimeError` while it runs."""
        return self._decoder.turn


@contextmanager
def stream_turn(transport: Transport, call: Call[Turn], timeout: Seconds) -> Iterator[TurnStream]:
    """Run a turn and read its tokens as they come. Leaving the block early cancels the turn."""
    decoder: TurnDecoder | None = None
    try:
        with transport.stream(call, timeout) as source:
            decoder = TurnDecoder(source.response.headers.get("x-request-id"))
            with nullcontext(_read(source, decoder)) as tokens:
                yield TurnStream(decoder, tokens)
    finally:
        if decoder is not None and not decoder.is_over:
            transport.abandon(call)


def _read(source: EventSource, decoder: TurnDecoder) -> Generator[TokenEvent, None]:
    with mapped_errors(lost=StreamBroken), nullcontext(source.iter_sse()) as events:
        for event in events:
            tokens = decoder.feed(event)
            if tokens is not None:
                yield tokens
    decoder.end()
