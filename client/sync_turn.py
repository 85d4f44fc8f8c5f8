"""A turn as it runs, blocking."""

from __future__ import annotations

from collections.abc import Iterator

from httpx_sse import EventSource

from client.edge import mapped_errors
from client.errors import StreamBroken
from client.models import TokenEvent, Turn
from client.stream import TurnDecoder


class TurnStream:
    """The running turn: iterate to get its tokens, then read `turn`."""

    def __init__(self, source: EventSource) -> None:
        self._decoder = TurnDecoder(source.response.headers.get("x-request-id"))
        self._tokens = self._read(source)

    def __iter__(self) -> Iterator[TokenEvent]:
        return self._tokens

    def _read(self, source: EventSource) -> Iterator[TokenEvent]:
        with mapped_errors(lost=StreamBroken):
            for event in source.iter_sse():
                tokens = self._decoder.feed(event)
                if tokens is not None:
                    yield tokens
        self._decoder.end()

    @property
    def turn(self) -> Turn:
        """The turn, over or paused. Raises `RuntimeError` while it runs."""
        return self._decoder.turn
